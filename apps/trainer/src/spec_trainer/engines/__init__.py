"""Engines that run the target. Each is found by entry point; heavy imports wait until one is constructed."""
