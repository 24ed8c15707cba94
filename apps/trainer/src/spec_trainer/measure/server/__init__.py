"""``evaluate --server``: measure the speed and acceptance length of a running server as a client."""
