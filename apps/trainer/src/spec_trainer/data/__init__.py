"""Training data: files or a hub id -> rows -> samples -> global batches -> micro-batches.

Reads top-down: ``sources`` (where rows come from), ``rows`` (the shapes a row may have), ``chat`` and ``turns``
(conversations to text and assistant spans), ``tokens`` (text to ids and masks), ``dataset`` (samples, report,
split, digest), ``batching`` (which sample is trained when and where), ``packing`` (tensors).

Nothing here reads a process group: topology arrives as plain integers.
"""
