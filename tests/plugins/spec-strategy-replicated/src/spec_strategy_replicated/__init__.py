"""Strategy replicated: every process holds the whole draft."""
