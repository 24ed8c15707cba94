"""The main job end to end on this machine, with nothing else at hand."""
