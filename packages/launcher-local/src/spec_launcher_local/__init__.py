"""The launcher ``local`` starts the processes of a run on this host."""
