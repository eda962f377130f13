"""Which layer gets how many bits."""
