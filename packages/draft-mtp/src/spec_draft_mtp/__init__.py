"""The multi-token-prediction head as a draft."""
