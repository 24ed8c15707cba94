"""Training data: files or a hub id -> rows -> samples -> global batches -> micro-batches.

Reads top-down: ``sources`` (where rows come from), ``rows`` (the shapes a row may have), ``chat`` and ``turns``
(conversations to text and assistant spans), ``tokens`` (text to ids and masks), ``row_encoder`` (all of this in one
process or many), ``dataset`` (samples, report, split, digest), ``kept`` (a long rendering in the run directory),
``batching`` (which sample is trained when and where), ``packing`` (tensors).

Nothing here reads a process group: topology arrives as plain integers.
"""
