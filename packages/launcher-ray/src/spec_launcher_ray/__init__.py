"""Launcher ray: the processes of a run in actors of a Ray cluster."""
