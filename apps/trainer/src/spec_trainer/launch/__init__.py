"""Launchers: how the processes of a run come to be, are watched, and end."""
