"""Weight transports: fresh draft weights on their way from a trainer to a live engine."""
