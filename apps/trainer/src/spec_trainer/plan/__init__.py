"""This package resolves and checks a run before anything starts, and computes what it needs."""
