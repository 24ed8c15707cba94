"""Strategy fsdp: FSDP2 over the data-parallel axis, float32 masters of any compute dtype."""
