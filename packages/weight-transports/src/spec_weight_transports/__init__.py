"""Weight transports send new draft weights from a trainer to a running engine."""
