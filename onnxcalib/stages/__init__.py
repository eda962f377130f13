"""The method, one file a stage."""
