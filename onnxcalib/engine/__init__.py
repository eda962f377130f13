"""Who runs graphs."""
