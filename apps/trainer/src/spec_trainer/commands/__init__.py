"""The commands, one per module; ``cli.py`` parses the arguments and calls them."""
