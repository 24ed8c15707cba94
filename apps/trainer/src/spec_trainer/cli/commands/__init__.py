"""Each module has one command; ``cli.py`` parses the arguments and calls it."""
