"""An optimizer whose code has a bug."""
