"""The quickstart trains, exports and evaluates a small draft on this machine, without downloads."""
