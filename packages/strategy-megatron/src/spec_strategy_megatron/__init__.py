"""Strategy ``megatron``: tensor and data parallelism by Megatron-Core."""
