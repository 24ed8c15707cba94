"""Trackers send the scalars of each step of a run to a service or a file."""
