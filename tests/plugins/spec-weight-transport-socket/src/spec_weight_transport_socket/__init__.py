"""A weight transport by somebody else."""
