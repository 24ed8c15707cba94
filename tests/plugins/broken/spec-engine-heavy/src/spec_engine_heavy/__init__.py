"""An engine whose module may not be imported by commands that do not name it."""
