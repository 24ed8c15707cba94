"""Push draft weights to running servers, once by a command or repeatedly while a run trains."""
