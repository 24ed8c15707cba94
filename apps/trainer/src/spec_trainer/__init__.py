"""This package is spec-trainer: its command line, data handling, training loop and controller."""
