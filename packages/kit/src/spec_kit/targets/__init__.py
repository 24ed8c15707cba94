"""This library reads a target's folder: configuration, weights, frozen tensors and image processor."""

from typing import TYPE_CHECKING

from spec_kit.lazy import lazy_names
from spec_kit.targets.hub_folder import hub_name
from spec_kit.targets.quantised_weights import quantised_weight
from spec_kit.targets.quiet_transformers import quiet_transformers
from spec_kit.targets.safetensors_index import StoredTensor, stored_tensors
from spec_kit.targets.same_weights import check_same_weights
from spec_kit.targets.target_copy import check_outside, copy_target
from spec_kit.targets.target_reader import check_target_tensors, read_target, read_target_tensors
from spec_kit.targets.tokenizer_tokens import tokenizer_tokens

if TYPE_CHECKING:
    from spec_kit.targets.target_images import TargetImages, decoded_image, media_type
else:
    __getattr__ = lazy_names(__name__, __file__, extra="images")

__all__ = [
    "StoredTensor",
    "TargetImages",
    "check_outside",
    "check_same_weights",
    "check_target_tensors",
    "copy_target",
    "decoded_image",
    "hub_name",
    "media_type",
    "quantised_weight",
    "quiet_transformers",
    "read_target",
    "read_target_tensors",
    "stored_tensors",
    "tokenizer_tokens",
]
