"""The quickstart: train, export and evaluate a small draft on this machine, without downloads."""
