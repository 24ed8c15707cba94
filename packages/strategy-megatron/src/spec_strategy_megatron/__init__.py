"""Strategy megatron: tensor and data parallel by Megatron-Core."""
