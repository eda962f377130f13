"""What a quantized file does, loses, costs, and why."""
