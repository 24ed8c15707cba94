"""This package has the drivers of a run and the programs of its worker processes."""
