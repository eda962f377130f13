"""What a target will make of a quantized file, node by node."""
