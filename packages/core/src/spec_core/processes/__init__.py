"""For launchers and engines: starting a process, talking to it, and ending what it leaves behind."""
