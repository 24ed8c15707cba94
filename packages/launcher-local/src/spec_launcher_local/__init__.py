"""Launcher local: the processes of a run on this host."""
