"""Engine ``hf``, the reference engine: Transformers runs the target in the trainer's process."""
