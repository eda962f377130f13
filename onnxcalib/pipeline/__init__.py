"""The pipelines: plain, light and advanced as lists of stages."""
