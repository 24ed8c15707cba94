"""NVIDIA CUDA backend: packaged as metadata until its issue lands."""
