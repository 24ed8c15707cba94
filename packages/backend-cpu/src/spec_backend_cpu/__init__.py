"""CPU backend: shared memory, gloo, in-process transport; the reference for every other backend."""
