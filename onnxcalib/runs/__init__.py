"""The run directory: every stage's value kept, by what it was computed from."""
