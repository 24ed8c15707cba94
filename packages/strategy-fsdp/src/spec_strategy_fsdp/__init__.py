"""Strategy ``fsdp``: FSDP2 over the data-parallel ranks, with float32 master weights for any compute dtype."""
