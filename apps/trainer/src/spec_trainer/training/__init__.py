"""This package has the training loop, and the functions that build the objects it uses."""
