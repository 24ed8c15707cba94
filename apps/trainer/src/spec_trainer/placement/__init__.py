"""Roles of a run's processes, and the devices and shares of devices that they get."""
