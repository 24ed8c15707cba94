"""This package is the strategy ``fsdp``: FSDP2 with float32 master weights for any compute dtype."""
