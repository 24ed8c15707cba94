"""Drafts as others publish them, written by hand at a toy size: each converts bitwise both ways and trains on."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from spec_core import Draft, plugins
from spec_core.errors import UsageError
from spec_kit.layers import TargetOps
from spec_kit.targets import read_target, read_target_tensors
from spec_trainer.cli.commands.convert import convert_draft
from spec_trainer.cli.commands.formats import read_format

from .draft_batches import denominators, make_batch, random_documents
from .draft_parts import CPU
from .published_layouts import EMBEDDING, HEAD, KEPT, LAYOUTS, LLAMA, SLIDING, VOCABULARY

REFUSED = {
    "speculators 0.9, P-EAGLE with windows": (
        "speculators, P-EAGLE",
        {"transformer_layer_config": {**LLAMA, **SLIDING, "layer_types": ["sliding_attention"]}},
        "sliding_window=16: P-EAGLE is trained with full attention only",
    ),
    "speculators, DFlash whose first slot guesses": (
        "speculators, DFlash",
        {"sample_from_anchor": True},
        "sample_from_anchor=True: expected False",
    ),
    "speculators, MTP": (
        "RedHat, Qwen3 8B",
        {"speculators_model_type": "mtp"},
        "it is in the layout of speculators, of the algorithm 'mtp'",
    ),
}
TRAINED = {
    "eagle3": {"num_steps": 3},
    "peagle": {"num_guesses": 3},
    "dflash": {"anchor_share": 1.0},
    "dflash2": {"anchor_share": 1.0},
    "dspark": {"anchor_share": 1.0},
}


@pytest.fixture(scope="module")
def target(make_target):
    return read_target(make_target("llama"))


def write(layout, target, folder, **changed):
    """Write the folder as it would be published, of random weights."""
    torch.manual_seed(0)
    frozen = read_target_tensors(target)
    tensors = {name: torch.randn(shape) / shape[-1] ** 0.5 for name, shape in layout.shapes.items()}
    ids = torch.cat([torch.arange(20), 20 + 3 * torch.arange(KEPT - 20)])
    if layout.is_reduced:
        tensors["d2t"] = ids - torch.arange(KEPT)
        tensors["t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill_(0, ids, value=True)
    if EMBEDDING in layout.copies:
        tensors[EMBEDDING] = frozen.embedding_VH.clone()
    if HEAD in layout.copies or (HEAD in tensors and layout.algorithm in ("dflash", "dspark")):
        tensors[HEAD] = frozen.head_VH[ids] if layout.is_reduced else frozen.head_VH.clone()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**layout.fields, **changed}))
    save_file(tensors, folder / "model.safetensors")
    return folder


def read(folder):
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def same(theirs, ours, changed):
    """Fields of both have the same values. Null means that a field is absent."""
    shared = {key: value for key, value in theirs.items() if value is not None and key in ours} | changed
    assert {key: ours[key] for key in shared} == shared


@pytest.mark.parametrize("name", LAYOUTS)
def test_it_converts_bitwise_both_ways(target, tmp_path, name):
    layout = LAYOUTS[name]
    theirs = write(layout, target, tmp_path / "theirs")
    convert_draft(theirs, str(target.folder), tmp_path / "ours")
    fields, tensors = read(theirs)
    expected, found = {}, read(tmp_path / "ours")[1]
    for stored, tensor in tensors.items():
        own = stored.removeprefix("model.")
        if stored not in layout.copies:
            first = "midlayer." if layout.algorithm == "eagle3" else "layers.0."
            expected[own.replace("layers.0.", first)] = tensor
    if layout.algorithm == "eagle3":  # a draft without a head has the target's
        expected.setdefault(HEAD, read_target_tensors(target).head_VH)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[own], tensor) for own, tensor in expected.items())
    is_speculators = "speculators_model_type" in fields
    wanted = read_format("speculators", ()) if is_speculators else None
    convert_draft(tmp_path / "ours", str(target.folder), tmp_path / "back", wanted)
    back, again = read(tmp_path / "back")
    if not is_speculators:
        same(fields, back, layout.changed)
        assert again.keys() == found.keys()
        assert all(torch.equal(again[own], tensor) for own, tensor in found.items())
        return
    kept = {stored for stored in tensors if stored not in layout.copies}
    assert again.keys() == kept
    assert all(torch.equal(again[stored], tensors[stored]) for stored in kept)
    named = (
        "architectures",
        "speculators_version",
        "speculators_config",
        "transformer_layer_config",
        "torch_dtype",
    )
    same({key: value for key, value in fields.items() if key not in named}, back, {})
    same(fields["transformer_layer_config"], back["transformer_layer_config"], {})


@pytest.mark.parametrize("name", LAYOUTS)
def test_it_drafts_and_trains_on(target, tmp_path, name):
    algorithm = LAYOUTS[name].algorithm
    theirs = write(LAYOUTS[name], target, tmp_path / "theirs")
    plugin, frozen = plugins.load(Draft, algorithm), read_target_tensors(target)
    draft = plugin(plugin.Config(name=algorithm, init_from=theirs, **TRAINED[algorithm]))
    module, ops = draft.build(target, frozen, None), TargetOps(target, frozen, CPU, torch.float32)
    documents = random_documents(target, [12, 9], 1, len(draft.required_features(target).layers))
    proposer = draft.proposer(module, ops)
    proposer.extend(documents[0].ids[1:].tolist(), documents[0].states[:-1])
    assert len(proposer.propose(3, 0.0, torch.Generator()).token_ids) == 3
    step = make_batch(documents, [0, 0]), denominators(draft, documents), ops
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=1e-3), []
    for _ in range(2):
        loss = module(*step).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert all(parameter.grad.any() for parameter in module.parameters())
    assert losses[1] < losses[0]


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_in_one_line(target, tmp_path, name):
    layout, changed, line = REFUSED[name]
    theirs = write(LAYOUTS[layout], target, tmp_path / "theirs", **changed)
    with pytest.raises(UsageError, match=rf"\A[^\n]*{line}[^\n]*\Z"):
        convert_draft(theirs, str(target.folder), tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
