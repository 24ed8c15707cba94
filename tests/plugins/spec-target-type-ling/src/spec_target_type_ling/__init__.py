"""Types of targets by somebody else."""
