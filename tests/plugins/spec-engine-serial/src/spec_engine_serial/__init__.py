"""An engine by somebody else that speculates."""
