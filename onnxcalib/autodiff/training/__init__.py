"""Gradients by ONNX Runtime training."""
