"""Assign roles, devices and shares of devices to the processes of a run."""
