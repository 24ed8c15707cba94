"""This package is the backend for Huawei Ascend NPUs, with HCCL and memory shared between processes."""
