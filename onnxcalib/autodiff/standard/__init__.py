"""Gradients as a graph of standard ops, for any runtime."""
