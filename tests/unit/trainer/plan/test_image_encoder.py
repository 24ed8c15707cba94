"""Sizes of image encoders, from files alone, against the very modules and the tensors that they make."""

import json
import re
import weakref
from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spec_kit.targets import TargetImages
from spec_trainer.plan.image_encoder import read_image_encoder

from ....image_requests import num_rows_of, picture
from ....seeing_targets import ALL_SEEING, GEMMA, SEEING, TWO_WAY

SIZE = (40, 40)
TOWERS = {GEMMA: ("vision_tower", "embed_vision"), TWO_WAY: ("vision_tower", "embed_vision")}
"""Modules that turn pixels into embeddings; ``visual`` in Qwen's targets."""


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that are made inside and still exist, and their most at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.most = self._now = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {
            leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)
        }
        for leaf in tree_leaves(result):
            if not torch.is_tensor(leaf) or leaf.untyped_storage().data_ptr() in known:
                continue
            storage = leaf.untyped_storage()
            if storage.data_ptr() not in self._seen:
                self._seen.add(storage.data_ptr())
                self._now += storage.nbytes()
                weakref.finalize(storage, self._freed, storage.data_ptr(), storage.nbytes())
        self.most = max(self.most, self._now)
        return result

    def _freed(self, address: int, num_bytes: int) -> None:
        self._seen.discard(address)
        self._now -= num_bytes


@pytest.mark.parametrize("kind", ALL_SEEING)
def test_sizes_are_those_of_the_target(seeing_target, kind):
    folder = seeing_target(kind)
    encoder = read_image_encoder(folder)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
    towers = [getattr(model.model, name) for name in TOWERS.get(kind, ("visual",))]
    own_name = re.compile(r"(?:model\.)?(?:visual|vision_tower|embed_vision)\.(.*)")
    stored = {own_name.fullmatch(name)[1]: tensor.shape for name, tensor in encoder.tensors.items()}
    state = [part.state_dict() for part in towers]
    assert stored == {name: tuple(value.shape) for part in state for name, value in part.items()}

    _, image = picture(SIZE)
    prepared = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")(
        [image], return_tensors="pt"
    )
    tokens = num_rows_of(prepared)
    assert tokens == TargetImages(folder).num_tokens(image)
    if kind in SEEING:
        assert encoder.pixel_bytes(tokens) == prepared["pixel_values"].nbytes
    else:  # it pads an image to the most patches
        assert 0 < encoder.pixel_bytes(tokens) <= prepared["pixel_values"].nbytes

    arrays = {name: array for name, array in prepared.items() if not name.startswith("num_")}
    with torch.no_grad(), LiveBytes() as live:
        model.get_image_features(**arrays)
    least = encoder.activation_bytes(tokens, itemsize=4)
    assert least <= live.most <= 8 * least


def test_ranks_divide_the_inner_values_of_a_layer(seeing_target):
    encoder = read_image_encoder(seeing_target("qwen3_vl"))
    assert encoder.activation_bytes(10, 2) == 10 * 4 * (2 * 16 + 24) * 2
    assert encoder.activation_bytes(10, 2, num_ranks=2) == 10 * 4 * (2 * 16 + 12) * 2
    gated = read_image_encoder(seeing_target("qwen2_5_vl"))
    assert gated.activation_bytes(1, 4) == 4 * (2 * 16 + 2 * 24) * 4


@pytest.mark.parametrize("kind", SEEING)
def test_the_largest_image_is_what_the_image_processor_does_not_scale_down(seeing_target, kind):
    folder = seeing_target(kind)
    most = read_image_encoder(folder).most_tokens
    (_, kept), (_, scaled) = picture((40, 40)), picture((400, 400))
    assert most == TargetImages(folder).num_tokens(kept) == TargetImages(folder).num_tokens(scaled)


def test_of_files_that_name_no_sizes_nothing_is_known(seeing_target, tiny_llama, tmp_path):
    assert read_image_encoder(tiny_llama) is None
    folder = seeing_target("qwen3_vl")
    for name in ("model.safetensors", "preprocessor_config.json"):
        (tmp_path / name).symlink_to(folder / name)
    fields = json.loads((folder / "config.json").read_text())
    for vision in ({}, None, {"hidden_size": 16}, {**fields["vision_config"], "intermediate_size": "many"}):
        (tmp_path / "config.json").write_text(json.dumps({**fields, "vision_config": vision}))
        assert read_image_encoder(tmp_path) is None
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (tmp_path / "preprocessor_config.json").unlink()
    assert read_image_encoder(tmp_path).most_tokens is None
