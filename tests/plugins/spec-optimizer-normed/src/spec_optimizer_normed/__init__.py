"""Optimizer normed: momentum, and steps of one length for each matrix."""
