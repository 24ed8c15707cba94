"""This package is the strategy ``megatron``: tensor and data parallelism by Megatron-Core."""
