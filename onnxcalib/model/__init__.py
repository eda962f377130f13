"""The ONNX file: reading, preparing, layers, sub-models, QDQ nodes, writing."""
