"""The run directory: finished work by what it was computed from."""
