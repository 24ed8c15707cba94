"""For whoever reads a target: its configuration, its weight files, its frozen tensors."""
