"""The plugin that trains a target's multi-token-prediction head as a draft."""
