"""Trackers: services that get the scalars of each step of a run."""
