"""The controller of a run starts its workers through a launcher, hands out their work, and stops them."""
