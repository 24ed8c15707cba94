"""Drafts in the layout of speculators: what we write we read back, and what vLLM would misread is refused."""

import json

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from spec_core import Draft, plugins
from spec_core.errors import UsageError
from spec_engine_vllm.config import VllmConfig
from spec_engine_vllm.engine import VllmEngine
from spec_kit.drafting import recognise, write_speculators
from spec_kit.targets import read_target, read_target_tensors
from spec_trainer.cli.commands.evaluate import export_untrained

BLOCK = {"block_size": 4, "num_layers": 2, "num_features": 3, "mask_token_id": 90}
DRAFTS = {
    "eagle3": {"fc_norm": True, "norm_output": True, "layers": (1, 3, 5, 7), "num_layers": 2},
    "eagle3, reduced": {"vocab_size": 40, "norm_before_residual": True},
    "eagle3, q and k norms": {"qk_norm": True, "norm_before_fc": True, "sliding_window": 9},
    "peagle": {"num_guesses": 3, "num_layers": 2, "mask_token_id": 90},
    "dflash": BLOCK,
    "dflash, reduced": {**BLOCK, "vocab_size": 40},
    "dflash, sliding": {**BLOCK, "sliding_window": 8},
    "dflash2": {**BLOCK, "selector_top_k": 8},
    "dflash2, sliding": {**BLOCK, "selector_top_k": 8, "sliding_window": 8},
    "dspark": {**BLOCK, "markov_rank": 8},
    "dspark, sliding": {**BLOCK, "markov_rank": 8, "sliding_window": 8, "sample_from_anchor": False},
}
REFUSED = {
    "eagle3": ({"attention": "mla"}, "vLLM gives a chain layers of llama or qwen3"),
    "dflash": (
        {**BLOCK, "layer_types": ("sliding_attention", "full_attention"), "sliding_window": 8},
        "makes them causal",
    ),
    "dspark": ({**BLOCK, "markov_rank": 8, "markov_head": "gated"}, "its markov_head_type is not vanilla"),
}


@pytest.fixture(scope="module")
def target(make_target):
    return read_target(make_target("llama", head_dim=32, hidden_size=64))


def write(target, name, options, folder):
    """Write an untrained draft in both layouts; return the two folders and the command that serves the second."""
    plugin = plugins.load(Draft, name.partition(",")[0])
    torch.manual_seed(0)
    draft = plugin(plugin.Config(name=plugin.name, **options))
    served = export_untrained(draft, target, folder / "served")
    command = VllmEngine.serving.write(VllmConfig(name="vllm"), target, draft, served, folder / "theirs")
    return served, folder / "theirs", command


@pytest.mark.parametrize("name", DRAFTS)
def test_a_folder_is_read_back_as_the_same_draft(target, tmp_path, name):
    served, theirs, command = write(target, name, DRAFTS[name], tmp_path)
    ours, again = (recognise(folder, target) for folder in (served, theirs))
    assert type(again) is type(ours)
    assert again.exported_config(target) == ours.exported_config(target)
    weights, found = (
        draft.build(target, read_target_tensors(target), None).state_dict() for draft in (ours, again)
    )
    assert weights.keys() == found.keys()
    assert all(torch.equal(weights[key], found[key]) for key in weights)
    fields = json.loads((theirs / "config.json").read_text())
    assert fields["speculators_config"]["verifier"] == {
        "name_or_path": str(target.folder), "architectures": ["LlamaForCausalLM"],
    }  # fmt: skip
    assert "midlayer" not in "".join(load_file(theirs / "model.safetensors"))
    assert command.split()[-1] == str(theirs)


def test_a_folder_appears_whole_and_a_killed_process_is_in_nobodys_way(target, tmp_path, monkeypatch):
    plugin = plugins.load(Draft, "eagle3")
    served = export_untrained(draft := plugin(plugin.Config(name="eagle3")), target, tmp_path / "served")
    theirs = tmp_path / "theirs"

    def killed(tensors, file, **_):
        assert not theirs.exists()
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", killed)
        patch.setattr("shutil.rmtree", lambda *_, **__: None)
        with pytest.raises(SystemExit):
            write_speculators(draft, served, target, theirs, "name", 3)
    write_speculators(draft, served, target, theirs, "name", 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["served", "theirs"]


def test_a_full_disk_leaves_no_folder(target, tmp_path, limit_files):
    plugin = plugins.load(Draft, "eagle3")
    served = export_untrained(draft := plugin(plugin.Config(name="eagle3")), target, tmp_path / "served")
    limit_files(2000)
    with pytest.raises(SafetensorError, match="File too large"):
        write_speculators(draft, served, target, tmp_path / "theirs", "name", 3)
    assert [path.name for path in tmp_path.iterdir()] == ["served"]


@pytest.mark.parametrize("name", REFUSED)
def test_what_vllm_would_misread_is_refused_in_one_line(target, tmp_path, name):
    options, problem = REFUSED[name]
    with pytest.raises(UsageError, match=rf"\A[^\n]*{problem}[^\n]*\Z"):
        write(target, name, options, tmp_path)
    assert not (tmp_path / "theirs").exists()
