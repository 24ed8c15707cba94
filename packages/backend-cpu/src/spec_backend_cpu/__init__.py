"""This package is the CPU backend, with shared memory and gloo: the reference for other backends."""
