"""Turn training data (files or a hub id) into rows, samples, global batches and micro-batches.

Modules in order of use: ``sources`` (read rows), ``rows`` (the forms that a row may have), ``chat`` and ``turns``
(conversations to text and assistant spans), ``tokens`` (text to ids and masks), ``row_encoder`` (these steps in one
process or many), ``dataset`` (samples, report, split, digest), ``kept`` (cache of the samples in the run directory),
``batching`` (the samples of each step and rank), ``packing`` (tensors).

No module here uses a process group: numbers of ranks are passed as plain integers.
"""
