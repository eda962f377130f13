"""What trains weights, biases and scales: layer by layer, or the network end to end."""
