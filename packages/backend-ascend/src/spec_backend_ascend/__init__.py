"""Huawei Ascend NPUs: HCCL, stateless groups, NPU IPC."""
