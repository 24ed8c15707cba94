"""This package has the inputs, directory, batch schedule and metrics of a run."""
