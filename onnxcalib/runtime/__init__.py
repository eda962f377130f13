"""Sessions of onnxruntime, and which runtime is installed."""
