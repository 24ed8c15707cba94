"""Train with decode: the run's engine answers prompts with the current draft, and the run trains on the answers."""
