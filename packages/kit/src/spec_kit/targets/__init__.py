"""Library to read a target from its folder: its configuration, weight files and frozen tensors."""

from spec_kit.targets.safetensors_index import StoredTensor, stored_tensors
from spec_kit.targets.target_reader import check_target_tensors, read_target, read_target_tensors

__all__ = ["StoredTensor", "check_target_tensors", "read_target", "read_target_tensors", "stored_tensors"]
