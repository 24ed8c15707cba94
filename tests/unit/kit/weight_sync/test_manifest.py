"""A manifest says what an update holds; a layout, what a rank can take."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from spec_core import Manifest
from spec_core.errors import ArtifactError, EngineError, ProtocolError
from spec_kit.weight_sync import DraftLayout, tensors_digest
from spec_kit.weight_sync.digest import tensor_entry
from spec_testing.weight_stage import odd_weights


def manifest_of(weights, target="t"):
    entries = tuple(tensor_entry(name, tensor) for name, tensor in weights.items())
    return Manifest(group="g", version=3, parent=2, fence=1, target=target, tensors=entries)


def test_manifest_survives_the_way_as_json():
    manifest = manifest_of(odd_weights(0))
    assert Manifest.decode(manifest.encode()) == manifest
    assert manifest.digest == tensors_digest(odd_weights(0).items())
    assert manifest.num_bytes == sum(tensor.nbytes for tensor in odd_weights(0).values())


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-1],
        lambda text: text.replace('"version":3', '"version":"3"'),
        lambda text: text.replace('"format":1', '"format":2'),
        lambda text: text.replace('"fence":1', '"fence":1,"extra":1'),
        lambda text: text.replace('"flags"', '"odd"'),
    ],
)
def test_what_is_no_manifest_is_refused_in_one_line(damage):
    text = manifest_of(odd_weights(0)).encode().decode()
    with pytest.raises(ProtocolError, match="no Manifest") as caught:
        Manifest.decode(damage(text))
    assert "\n" not in str(caught.value)


def test_equal_weights_have_one_digest_whatever_their_version():
    one = manifest_of(odd_weights(0))
    assert one.model_copy(update={"version": 9, "fence": 7}).digest == one.digest
    assert manifest_of(odd_weights(1)).digest != one.digest


def test_vocabulary_is_that_of_the_mapping_alone():
    weights = odd_weights(0)
    assert manifest_of(weights).vocabulary == manifest_of(odd_weights(1)).vocabulary != ""
    moved = weights | {"d2t": weights["d2t"] + 1}
    assert manifest_of(moved).vocabulary != manifest_of(weights).vocabulary
    assert manifest_of({"fc": torch.zeros(3)}).vocabulary == ""


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"odd": None}, "it lacks odd"),
        ({"new": torch.zeros(1)}, "it has new besides"),
        ({"left": torch.zeros(5, 4)}, r"left is float32 \[5, 4\], expected float32 \[5, 5\]"),
        ({"left": torch.zeros(5, 5).half()}, r"left is float16 \[5, 5\], expected float32"),
        ({"d2t": torch.arange(11)}, "it maps the vocabulary differently"),
    ],
)
def test_update_that_does_not_fit_is_refused_in_one_line(change, problem):
    layout = DraftLayout.of_tensors(odd_weights(0).items(), "t")
    weights = {name: tensor for name, tensor in (odd_weights(1) | change).items() if tensor is not None}
    with pytest.raises(EngineError, match=f"version 3 does not fit .*: {problem}") as caught:
        layout.check(manifest_of(weights))
    assert "\n" not in str(caught.value)
    layout.check(manifest_of(odd_weights(1)))


def test_update_for_another_target_is_refused():
    layout = DraftLayout.of_tensors(odd_weights(0).items(), "t")
    with pytest.raises(EngineError, match="for another target"):
        layout.check(manifest_of(odd_weights(0), target="u"))


def test_layout_of_a_folder_is_that_of_its_tensors(tmp_path):
    weights = {name: tensor.contiguous() for name, tensor in odd_weights(0).items()}
    save_file(weights, tmp_path / "model.safetensors")
    found = DraftLayout.of_folder(tmp_path, SimpleNamespace(digest="t"))
    assert found == DraftLayout.of_tensors(weights.items(), "t")
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(ArtifactError, match="cannot be read"):
        DraftLayout.of_folder(tmp_path, SimpleNamespace(digest="t"))
