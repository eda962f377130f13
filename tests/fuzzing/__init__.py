"""Random valid graphs, mutants of files, and processes that try them; tests and tools/fuzz.py share them."""
