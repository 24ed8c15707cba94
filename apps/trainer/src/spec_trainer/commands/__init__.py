"""Commands, one in each module: ``cli.py`` parses words and calls one."""
