"""Checkpoints: ``checkpoints/step-N``, written whole or not at all, rotated, with a link to the best one.

Reads top-down: ``folder`` (what a step folder holds, and whether it is whole), ``resume`` (which one a run begins
with), ``storage`` (the sharded state in safetensors files), ``store`` (save, load, rotate), ``pickled`` (the state
as earlier versions wrote it). docs/checkpoints.md has the format.
"""
