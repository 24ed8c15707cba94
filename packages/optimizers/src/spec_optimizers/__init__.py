"""The optimizers ``adamw`` and ``muon`` update the float32 weights of a draft."""
