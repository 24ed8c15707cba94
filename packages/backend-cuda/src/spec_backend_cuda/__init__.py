"""NVIDIA CUDA: MPS, device memory shared between processes, NCCL, attention kernels. See ``backend.CudaBackend``."""
