"""The reference backend: gloo, shared memory, in-process transport."""
