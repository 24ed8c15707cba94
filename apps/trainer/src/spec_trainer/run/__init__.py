"""Inputs, directory, batch schedule and metrics of a run."""
