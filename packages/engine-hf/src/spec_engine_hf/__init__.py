"""This package is the reference engine ``hf``: Transformers runs the target in the trainer's process."""
