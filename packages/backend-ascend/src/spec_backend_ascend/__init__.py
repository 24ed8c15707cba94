"""Huawei Ascend backend: packaged as metadata until its issue lands."""
