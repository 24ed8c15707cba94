"""This package has the command line: each command, its flags and output, and the quickstart."""
