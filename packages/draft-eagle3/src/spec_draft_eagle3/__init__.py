"""Eagle3 draft plugin."""
