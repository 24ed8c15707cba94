"""spec-trainer: command line, data, training loop and controller."""
