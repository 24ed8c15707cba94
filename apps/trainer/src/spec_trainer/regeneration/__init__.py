"""``spec-trainer regenerate``: the target answers the prompts of a data file anew.

Reads top-down: ``request`` (what is asked for), ``command`` (from request to document), ``conversation`` (one row,
turn by turn), ``answer_file`` (what is written, and how it goes on after an interruption).
"""
