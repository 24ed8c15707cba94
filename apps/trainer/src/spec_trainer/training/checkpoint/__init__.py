"""Write and rotate the checkpoints ``checkpoints/step-N``, with a link ``best`` to the best step.

Modules in reading order: ``folder`` (contents of a step folder, and checks that it is complete), ``resume`` (choice
of the checkpoint to resume from), ``store`` (save, load, rotate). The strategy writes and reads the state itself.
docs/checkpoints.md has the format.
"""
