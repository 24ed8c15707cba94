"""Interrupted: a run that stopped because somebody asked, after it had saved a checkpoint."""


class Interrupted(Exception):
    """The command line maps it to exit code 130; it is no error: it was asked for, and nothing is lost."""
