"""Alternate between decoding and training: an engine answers prompts, the run trains on the answers."""
