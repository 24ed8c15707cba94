"""The DSpark block draft."""
