"""Optimizers adamw and muon: how gradients change the float32 weights of a draft."""
