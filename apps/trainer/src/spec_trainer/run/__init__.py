"""A run: its inputs, directory, schedule and records."""
