"""Ends the process that imports it as Ctrl-C does, where a real engine would load its SDK for a minute."""

raise KeyboardInterrupt("engine heavy was imported")
