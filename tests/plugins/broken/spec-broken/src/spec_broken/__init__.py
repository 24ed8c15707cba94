"""Plugins whose module ends the process that imports it."""
