"""For engines whose program runs the target in processes of its own."""
