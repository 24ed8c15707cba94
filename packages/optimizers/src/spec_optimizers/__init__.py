"""The optimizers adamw and muon, which update the float32 weights of a draft."""
