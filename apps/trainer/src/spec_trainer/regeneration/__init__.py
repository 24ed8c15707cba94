"""``spec-trainer regenerate``: the target answers the prompts of a data file anew.

Reads top-down: ``request`` (the options), ``command`` (from options to document), ``conversation`` (one row, turn by
turn), ``answer_file`` (what is written, and how it continues after an interruption).
"""
