"""A tracker that fails where its key says."""
