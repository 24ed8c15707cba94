"""``spec-trainer regenerate``: the target generates new answers to the prompts of a data file.

Modules in reading order: ``request`` (the options), ``conversation`` (answers one row, turn by turn),
``row_requests`` (the requests to an engine, of many rows at once), ``answer_file`` (the output file, and how it is
continued after an interruption). The command is in ``cli/commands/regenerate.py``.
"""
