"""Command line, engines, strategies, data and the training loop."""
