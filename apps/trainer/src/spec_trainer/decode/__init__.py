"""Train with decode: the run's engine answers prompts, and the run trains on the answers."""
