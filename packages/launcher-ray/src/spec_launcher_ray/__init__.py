"""The launcher ``ray`` starts each worker process of a run by an actor in a Ray cluster."""
