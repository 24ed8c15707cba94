"""This package implements the command ``spec-trainer evaluate``.

Modules in reading order: ``request`` (the options), ``prepare`` (all checks before an engine starts), ``measure``
(decoding), ``document`` (the figures).
"""
