"""A tracker by somebody else."""
