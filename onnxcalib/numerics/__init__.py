"""Grids and ranges: NumPy only."""
