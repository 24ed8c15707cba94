"""``spec-trainer quickstart --target``: from a target to a measured draft, within a budget of time.

Modules in reading order: ``request`` (the options), ``folder`` (the files, by which a call goes on where another one
ended), ``budget`` (time), ``recipe`` and ``engine`` (what is chosen, and why), one module for each stage
(``prompts``, ``cost``, ``answers``, ``training``, ``figures``), and ``run``, which puts them together.
"""
