"""An engine by somebody else: the target runs in a process of its own."""
