"""A draft folder that cannot be evaluated is refused before any engine starts, each flaw with a line of its own."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from spec_core import Draft, plugins
from spec_engine_hf.engine import HfEngine
from spec_kit.targets.target_reader import read_target
from spec_trainer.cli.commands.evaluate import export_untrained

from .foreign_layouts import as_angelslim, as_specforge, as_speculators

LAYOUTS = {
    "speculators": ("dflash", as_speculators),
    "speculators, reduced": ("dflash, reduced", as_speculators),
    "specforge": ("eagle3", as_specforge),
    "angelslim": ("eagle3", as_angelslim),
}

SHAPES = {
    "eagle3": {"vocab_size": 40},
    "dflash": {
        "block_size": 4,
        "num_layers": 2,
        "layer_types": ("full_attention", "sliding_attention"),
        "sliding_window": 16,
    },
    "dflash, reduced": {"block_size": 4, "num_layers": 2, "sliding_window": 16, "vocab_size": 40},
}


@pytest.fixture(scope="module")
def whole(peaked_target, tmp_path_factory):
    """An untrained draft of each algorithm, without a flaw."""
    target, folders = read_target(peaked_target), {}
    for name, options in SHAPES.items():
        plugin = plugins.load(Draft, name.partition(",")[0])
        torch.manual_seed(0)
        folder = tmp_path_factory.mktemp("whole") / "draft"
        folders[name] = export_untrained(plugin(plugin.Config(name=plugin.name, **options)), target, folder)
    return folders


@pytest.fixture
def refused(command_line, peaked_target, rows_file, monkeypatch):
    """The one line that an evaluation of ``folder`` ends with; starting an engine would fail the test."""

    def start(*args):
        raise AssertionError("an engine was started")

    monkeypatch.setattr(HfEngine, "create", start)

    def evaluate(folder, *words, target=peaked_target):
        flags = ["--target", target, "--draft-model", folder, "--prompts", rows_file]
        return command_line("evaluate", *flags, *words).error

    return evaluate


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_draft_of_another_project_is_evaluated_and_converted(
    command_line, whole, peaked_target, rows_file, tmp_path, kind
):
    """The converted folder is our own export of the same weights, byte for byte."""
    algorithm, layout = LAYOUTS[kind]
    same, causal = whole[algorithm], {"sliding_window_non_causal": False} if layout is as_speculators else {}
    theirs = layout(same, peaked_target, tmp_path / "theirs", **causal)
    words = ["--target", peaked_target, "--draft-model", theirs]
    few = ["--prompts", rows_file, "--max-new-tokens", 4, "--temperature", 0, "--no-untrained", "--json"]
    assert json.loads(command_line("evaluate", *words, *few).out)["outputs_equal"]
    assert command_line("convert", *words, "--output", tmp_path / "converted").code == 0
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "converted" / name).read_bytes() == (same / name).read_bytes(), name
    assert "exists; choose a new folder" in command_line("convert", *words, "--output", theirs).error
    inside = peaked_target / "new" / "draft"
    refusal = command_line("convert", *words, "--output", inside).error
    assert refusal == (
        f"output {inside} lies in the target's folder {peaked_target}; choose a folder outside of it"
    )
    assert not inside.parent.exists()


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"speculators_model_type": "hydra"}, "it is in the layout of speculators, of the algorithm 'hydra'"),
        ({"draft_vocab_size": 50}, "lacks d2t"),
        ({"mask_token_id": None}, "mask_token_id=None, expected a valid integer"),
        ({"transformer_layer_config": {}}, "num_hidden_layers=None, expected a valid integer"),
    ],
)
def test_a_folder_of_speculators_that_cannot_be_expressed_is_refused(
    refused, whole, peaked_target, tmp_path, changed, problem
):
    fields = {"sliding_window_non_causal": False} | changed
    theirs = as_speculators(whole["dflash"], peaked_target, tmp_path / "theirs", **fields)
    assert problem in refused(theirs)


def test_a_copy_of_another_head_is_refused(refused, whole, peaked_target, tmp_path):
    theirs = as_speculators(
        whole["dflash"], peaked_target, tmp_path / "theirs", sliding_window_non_causal=False
    )
    stored = load_file(theirs / "model.safetensors")
    stored["lm_head.weight"] += 1
    save_file(stored, theirs / "model.safetensors")
    assert "its lm_head.weight is not the head of target" in refused(theirs)


@pytest.fixture
def flawed(whole, tmp_path):
    """``flawed("eagle3", config={...}, tensors=function)``: a copy with another config and other tensors."""

    def make(algorithm, config=None, tensors=None):
        folder = tmp_path / "draft"
        shutil.copytree(whole[algorithm], folder)
        edit_config(folder, config or {})
        if tensors is not None:
            stored = load_file(folder / "model.safetensors")
            tensors(stored)
            save_file(stored, folder / "model.safetensors")
        return folder

    return make


def edit_config(folder, changes):
    """None removes a field; a nested object is merged."""
    file = folder / "config.json"
    fields = json.loads(file.read_text())
    for key, value in changes.items():
        if value is None:
            del fields[key]
        else:
            fields[key] = {**fields[key], **value} if isinstance(value, dict) else value
    file.write_text(json.dumps(fields))


# Other flaws: tests/unit/draft_eagle3/test_export.py and tests/unit/draft_dflash/test_export.py.
CONFIGS = {
    "eagle3: ids of AngelSlim that contradict": (
        {"eagle_config": None, "aux_hidden_states_layer_ids": [2, 4, 5]},
        "aux_hidden_states_layer_ids that counts outputs, [2, 4, 5], do not name the same layers",
    ),
    "eagle3: unknown architecture": (
        {"architectures": ["LlamaForCausalLMEagle9"]},
        "architecture LlamaForCausalLMEagle9",
    ),
    "eagle3: speculators": (
        {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"},
        "hidden_size=None, expected a valid integer",
    ),
}


def test_a_tensor_of_another_dtype(refused, flawed):
    folder = flawed("dflash", tensors=lambda t: t.update({"fc.weight": t["fc.weight"].double()}))
    assert "fc.weight has dtype F64" in refused(folder)


@pytest.mark.parametrize("case", CONFIGS)
def test_configs(refused, flawed, case):
    changes, line = CONFIGS[case]
    assert line in refused(flawed(case.partition(":")[0], config=changes))


@pytest.mark.parametrize("algorithm", SHAPES)
def test_files(refused, flawed, algorithm):
    folder = flawed(algorithm)
    weights, config = folder / "model.safetensors", folder / "config.json"
    stored, fields = weights.read_bytes(), config.read_text()
    lines = []
    for file, content, line in (
        (
            weights,
            stored[:-1],
            "no complete safetensors file (download or export them anew): SafetensorError: Error while deserializing",
        ),
        (weights, b"PK", "no complete safetensors file"),
        (config, fields[:-9], "is not JSON"),
        (config, "[]", "config.json holds no JSON object"),
    ):
        kept = file.read_bytes()
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        lines.append(refused(folder))
        assert line in lines[-1]
        file.write_bytes(kept)
    weights.unlink()
    assert "model.safetensors cannot be read: No such file" in refused(folder)
    config.unlink()
    assert "it has no config.json; take the folder draft/ of a run" in refused(folder)
    assert len(set(lines)) == len(lines)


@pytest.mark.parametrize("algorithm", SHAPES)
def test_target_whose_head_no_draft_expresses(refused, whole, make_target, algorithm):
    assert "is a layer norm" in refused(whole[algorithm], target=make_target("gpt2"))


def test_more_draft_tokens_than_a_block_holds(refused, whole):
    line = refused(whole["dflash"], "--num-draft-tokens", 4)
    assert line.startswith("--num-draft-tokens=4: draft")
    assert "guesses 3 tokens in one block; use 3 or less" in line


def test_a_report_that_cannot_be_written(refused, whole, tmp_path):
    line = refused(whole["eagle3"], "--report", tmp_path)
    assert line == f"--report={tmp_path} is not a file that can be written; name another"
    assert "its folder does not exist" in refused(
        whole["eagle3"], "--report", tmp_path / "no" / "report.html"
    )


def test_no_room_for_a_prompt(refused, whole):
    assert "leave no room for a prompt in the 256 positions" in refused(
        whole["eagle3"], "--max-new-tokens", 252
    )


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("engine.dtyp=float32", "unknown key 'engine.dtyp' (did you mean 'dtype'?)"),
        ("engine.dtype=int3", "engine.dtype='int3'"),
        ("train.lr=1", "unknown section or key 'train'"),
        ("quickly", "override 'quickly' is not of the form section.key=value"),
    ],
)
def test_wrong_options(refused, whole, word, line):
    assert line in refused(whole["eagle3"], word)
