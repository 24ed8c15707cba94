"""The controller of a run starts workers through a launcher, sends them tasks, and stops them."""
