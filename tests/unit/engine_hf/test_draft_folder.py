"""load_draft with a stranger's draft, installed the way that any plugin is: a distribution with an entry point."""

import importlib
import itertools
import json
import sys

import pytest
import torch

from spec_core.errors import ArtifactError, TargetError
from spec_core.records import SamplingParams

from ...distributions import write_distribution

PLUGIN = '''
import json
import torch
from torch import nn
from spec_core import Draft, Proposal, Proposer
from spec_core.errors import ArtifactError, TargetError
from spec_core.records import FeatureSchema


class TableProposer(Proposer):
    def __init__(self, module, ops):
        self.module, self.ops, self.last, self.shapes = module, ops, 0, []

    def extend(self, next_ids, hidden_TNH):
        assert hidden_TNH.shape == (len(next_ids), 2, self.ops.embed(torch.tensor([0])).shape[1])
        self.last = next_ids[-1]

    def propose(self, num_tokens, temperature, generator):
        ids = []
        for _ in range(num_tokens):
            ids.append(int(self.module.table[ids[-1] if ids else self.last]))
        return Proposal(token_ids=tuple(ids))


class TableDraft(Draft):
    """Maps each token to one guess, read from draft.json."""

    name = "table"
    api_version = 1

    @classmethod
    def from_folder(cls, folder):
        file = folder / "draft.json"
        if not file.is_file():
            return None
        if "table" not in json.loads(file.read_text()):
            raise ArtifactError(f"{file} has no table")
        return cls(cls.Config(name="table", init_from=folder))

    def check_target(self, target):
        if target.norm == "layer":
            raise TargetError("table wants an RMS norm")

    def required_features(self, target):
        return FeatureSchema(layers=(0, target.num_layers), hidden_size=target.hidden_size, dtype=target.dtype)

    def build(self, target, tensors, token_counts, kernel):
        torch.randn(3)
        module = nn.Module()
        table = json.loads((self.config.init_from / "draft.json").read_text())["table"]
        module.register_buffer("table", torch.tensor(table))
        return module

    def proposer(self, module, ops):
        return TableProposer(module, ops)

    def denominators(self, supervision): ...
    def exported_config(self, target): ...
    def exported_tensors(self, weights, target): ...
'''

PROMPT = (5, 17, 3)


@pytest.fixture
def table_plugin(tmp_path, monkeypatch):
    points = "[spec_core.drafts]\ntable = table_draft:TableDraft\n"
    site = write_distribution(tmp_path / "site", "table-draft", points)
    (site / "table_draft.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(site)
    importlib.invalidate_caches()
    yield site
    sys.modules.pop("table_draft", None)


def draft_folder(tmp_path, content):
    folder = tmp_path / "draft"
    folder.mkdir(exist_ok=True)
    (folder / "draft.json").write_text(json.dumps(content))
    return folder


def successors(answer):
    """The table that knows the answer, where no token is followed by two different ones."""
    table = list(range(97))
    text = [PROMPT[-1], *answer]
    for a, b in itertools.pairwise(text):
        table[a] = b
    return table


def test_loaded_draft_speculates_and_keeps_the_output(table_plugin, open_engine, tiny_llama, tmp_path):
    engine = open_engine(tiny_llama)
    plain = SamplingParams(max_new_tokens=12, stop_at_eos=False)
    (answer,) = engine.generate([PROMPT], plain)
    state = torch.random.get_rng_state()
    engine.load_draft(draft_folder(tmp_path, {"table": successors(answer.token_ids)}))
    assert torch.equal(torch.random.get_rng_state(), state)
    (found,) = engine.generate(
        [PROMPT], SamplingParams(max_new_tokens=12, num_draft_tokens=3, stop_at_eos=False)
    )
    assert found.token_ids == answer.token_ids
    assert engine.acceptance().acceptance_length > 1.5


def test_folder_that_no_draft_knows_lists_what_is_installed(table_plugin, open_engine, tiny_llama, tmp_path):
    engine = open_engine(tiny_llama)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArtifactError, match=r"tried: .*table"):
        engine.load_draft(tmp_path / "empty")
    with pytest.raises(ArtifactError, match="not a folder"):
        engine.load_draft(tmp_path / "nowhere")


def test_broken_plugin_of_a_stranger_does_not_hide_the_others(
    table_plugin, open_engine, tiny_llama, tmp_path
):
    write_distribution(table_plugin, "broken-draft", "[spec_core.drafts]\nbroken = not_there:Draft\n")
    engine = open_engine(tiny_llama)
    engine.load_draft(draft_folder(tmp_path, {"table": list(range(97))}))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArtifactError, match="broken-draft"):
        engine.load_draft(tmp_path / "empty")


def test_draft_that_does_not_go_with_the_target_is_refused(table_plugin, open_engine, make_target, tmp_path):
    engine = open_engine(make_target("gpt2"))
    with pytest.raises(TargetError, match="RMS norm"):
        engine.load_draft(draft_folder(tmp_path, {"table": list(range(97))}))
