"""How the trainer is parallel: one module per strategy plugin."""
