"""What decides quantization parameters: calibration, rounding, equalization, tuning."""
