"""Engine hf: the target run by Transformers in the process of the trainer; the reference engine."""
