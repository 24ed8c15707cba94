"""This package is the draft plugin that trains a target's multi-token-prediction (MTP) head."""
