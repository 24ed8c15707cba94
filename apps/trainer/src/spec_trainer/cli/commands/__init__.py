"""Each module has one command; ``cli/app.py`` parses the arguments and calls it."""
