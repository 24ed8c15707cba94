"""This package is the backend for NVIDIA GPUs (``backend.CudaBackend``).

It has MPS, device memory shared between processes, NCCL and attention kernels.
"""
