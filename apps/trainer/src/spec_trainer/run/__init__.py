"""Inputs, directory, schedule and records of a run."""
