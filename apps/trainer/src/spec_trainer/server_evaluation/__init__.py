"""``evaluate --server``: the speed and acceptance length of a running server, asked as any client asks it."""
