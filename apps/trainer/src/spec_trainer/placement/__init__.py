"""Which process of a run is what, on which device, with which share of it."""
