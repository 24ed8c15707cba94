"""Fresh draft weights for running servers: once, by command, or again and again while a run trains."""
