"""This library reads a target's folder: configuration, weights, frozen tensors and image processor."""

from typing import TYPE_CHECKING

from spec_kit.lazy import lazy_names
from spec_kit.targets.hub_folder import hub_name
from spec_kit.targets.quantised_weights import quantised_weight
from spec_kit.targets.quiet_transformers import quiet_transformers
from spec_kit.targets.safetensors_index import StoredTensor, stored_tensors
from spec_kit.targets.same_weights import check_same_weights
from spec_kit.targets.target_copy import copy_target
from spec_kit.targets.target_reader import read_target, read_target_tensors

if TYPE_CHECKING:
    from spec_kit.targets.target_images import TargetImages, decoded_image
else:
    __getattr__ = lazy_names(__name__, __file__, extra="images")

__all__ = [
    "StoredTensor",
    "TargetImages",
    "check_same_weights",
    "copy_target",
    "decoded_image",
    "hub_name",
    "quantised_weight",
    "quiet_transformers",
    "read_target",
    "read_target_tensors",
    "stored_tensors",
]
