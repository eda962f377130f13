"""Gradients of a loss by either of two engines, behind one interface."""
