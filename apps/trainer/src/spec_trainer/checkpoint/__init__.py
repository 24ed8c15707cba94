"""Checkpoints: ``checkpoints/step-N``, written whole or not at all, rotated, with a link to the best one.

Modules in reading order: ``folder`` (what a step folder holds, and whether it is whole), ``resume`` (which one a run
begins with), ``store`` (save, load, rotate). The strategy writes and reads the state itself. docs/checkpoints.md has
the format.
"""
