"""Train with decode: the run's engine answers prompts with the draft of now, and the run trains on the answers."""
