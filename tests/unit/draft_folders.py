"""Exported folders of drafts: what tests do with them, and the tests that all drafts share.

A subclass of ``DraftFolderSuite`` names its module ``cases`` and gives the tables.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from spec_core import Draft, TargetSpec
from spec_core.errors import ArtifactError, ConfigError, TargetError
from spec_kit.drafting import write_draft
from spec_testing.draft_workbench import file_bytes, round_to

from .draft_batches import LLAMA3, random_documents, step_arguments
from .draft_parts import make_target, make_tensors

QWEN3_FIELDS = {
    "attention_bias": False, "head_dim": 8, "hidden_act": "silu", "hidden_size": 16, "intermediate_size": 24,
    "max_position_embeddings": 64, "model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06, "vocab_size": 29,
}  # fmt: skip
"""Fields of config.json that folders of other trainers share, for drafts of ``make_target``."""


def export(cases: Any, folder: Path, target: TargetSpec | None = None, **options: object) -> Any:
    """Train nothing: write a draft of large random weights, and return its module."""
    target, config = target or make_target(), cases.make_config(**options)
    module = cases.make_model(target, config)
    folder.mkdir(exist_ok=True)
    write_draft(cases.Draft(config), module.state_dict(), target, folder)
    return module


def read_fields(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def write_fields(folder: Path, fields: object) -> None:
    (folder / "config.json").write_text(json.dumps(fields))


def edit_fields(folder: Path, **changes: object) -> None:
    write_fields(folder, read_fields(folder) | changes)


def merge_fields(folder: Path, **changes: Any) -> None:
    """Change fields of config.json; merge fields that are objects."""
    fields = read_fields(folder)
    for key, value in changes.items():
        fields[key] = fields[key] | value if isinstance(value, dict) else value
    write_fields(folder, fields)


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """``edit`` changes the dictionary of tensors in place."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def rename_tensors(folder: Path, new_name: Callable[[str], str]) -> None:
    tensors = load_file(folder / "model.safetensors")
    renamed = {new_name(name): tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "model.safetensors")


def write_ramps(draft: Draft, target: TargetSpec, folder: Path) -> None:
    """Write a draft whose floating-point numbers depend on nothing but the shapes."""
    state = draft.build(target, make_tensors(target), None).state_dict()
    for tensor in state.values():
        if tensor.is_floating_point():
            tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape).remainder(251).sub(125) / 64)
    write_draft(draft, state, target, folder)


def assert_damaged(plugin: type[Draft], folder: Path, reason: str) -> None:
    """``from_folder`` refuses the folder in one line that holds ``reason``."""
    with pytest.raises(ArtifactError, match=re.escape(reason)) as caught:
        plugin.from_folder(folder)
    assert "\n" not in str(caught.value)


def assert_same_weights(
    plugin: type[Draft], folder: Path, module: torch.nn.Module, target: TargetSpec
) -> Any:
    """The folder's draft has the weights of ``module``; return its module."""
    again = plugin.from_folder(folder).build(target, make_tensors(target), None)
    expected = module.state_dict()
    assert again.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in again.state_dict().items())
    return again


def assert_same_angles(module: torch.nn.Module, expected: torch.nn.Module) -> None:
    pair = (one.rope.angles(torch.arange(60), torch.float32) for one in (module, expected))
    assert all(torch.equal(got, wanted) for got, wanted in zip(*pair, strict=True))


class DraftFolderSuite:
    cases: ClassVar[Any]
    plain_options: ClassVar[Mapping[str, object]] = {}
    """Options of the draft that the tables below are about."""
    training: ClassVar[Mapping[str, object]] = {"num_anchors": 6, "anchor_share": 1.0}
    """Options that no folder holds."""
    exports: ClassVar[Sequence[Mapping[str, object]]] = ({},)
    """Options of drafts that come back."""
    contradictions: ClassVar[Sequence[tuple[str, object]]] = ()
    """Options that are not the values of a plain draft's folder."""
    agreements: ClassVar[Mapping[str, object]] = {}
    """Options that are the values of a plain draft's folder."""
    other_targets: ClassVar[Sequence[tuple[Mapping[str, object], str]]] = ()
    """Changes of the target, and why a plain draft's folder does not go with it."""
    foreign: ClassVar[Sequence[Mapping[str, object]]] = ()
    """Contents of config.json in folders of other algorithms."""
    damaged: ClassVar[Sequence[tuple[Mapping[str, object], str]]] = ()
    """Changes of a plain draft's config.json, and what the refusal says."""

    def new_config(self, **options: object) -> Any:
        """Return a configuration of these options alone."""
        return type(self.cases.make_config())(**options)

    @pytest.fixture
    def plain(self, tmp_path: Path) -> Path:
        """The folder of a plain draft."""
        export(self.cases, tmp_path / "plain", **self.plain_options)
        return tmp_path / "plain"

    @classmethod
    def pytest_generate_tests(cls, metafunc: pytest.Metafunc) -> None:
        """Each row of a table is a test."""
        for table in ("exports", "contradictions", "other_targets", "foreign", "damaged"):
            if table in metafunc.fixturenames:
                metafunc.parametrize(table, getattr(cls, table), ids=str)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_a_draft_comes_back_with_the_same_step_and_bytes(self, tmp_path, exports, dtype):
        target, config = make_target(dtype=dtype, rope=LLAMA3), self.cases.make_config(**exports)
        module = export(self.cases, tmp_path / "first", target, **exports)
        stored = getattr(torch, dtype)
        module.load_state_dict({name: round_to(value, stored) for name, value in module.state_dict().items()})
        again = assert_same_weights(self.cases.Draft, tmp_path / "first", module, target)
        assert_same_angles(again, module)
        plugin = self.cases.Draft
        before = plugin(config)
        draft = plugin(self.new_config(init_from=tmp_path / "first", **self.training))
        for each in ("required_features", "shard_hints", "exported_config"):
            assert getattr(draft, each)(target) == getattr(before, each)(target)
        assert draft.serving_methods == before.serving_methods
        worker = plugin(type(config).model_validate(draft.config.model_dump()))
        assert worker.shape(target) == draft.shape(target)
        counts = torch.ones(target.vocab_size, dtype=torch.int64)
        again, same = (one.build(target, make_tensors(target), counts) for one in (draft, before))
        same.load_state_dict(module.state_dict())
        documents = random_documents(target, [12, 9], 1, len(draft.required_features(target).layers))
        step, expected = (step_arguments(one, target, documents) for one in (draft, before))
        assert torch.equal(step[1], expected[1])
        assert torch.equal(again(*step).loss, same(*expected).loss)
        (tmp_path / "second").mkdir()
        write_draft(draft, again.state_dict(), target, tmp_path / "second")
        assert file_bytes(tmp_path / "first") == file_bytes(tmp_path / "second")

    def test_init_from_refuses_an_option_that_contradicts_it(self, plain, contradictions):
        option, value = contradictions
        with pytest.raises(ConfigError, match=f"draft.{option}="):
            self.cases.Draft(self.new_config(init_from=plain, **{option: value}))

    def test_init_from_takes_options_that_agree(self, plain):
        options = {**self.agreements, **self.training}
        self.cases.Draft(self.new_config(init_from=plain, **options)).check_target(make_target())

    def test_other_targets_are_refused_in_one_line(self, plain, other_targets):
        changes, reason = other_targets
        with pytest.raises(TargetError, match=re.escape(reason)) as caught:
            self.cases.Draft.from_folder(plain).check_target(make_target(**changes))
        assert f"draft {plain} does not go with target" in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_other_folders_are_not_recognised(self, tmp_path, foreign):
        assert self.cases.Draft.from_folder(tmp_path / "absent") is None
        assert self.cases.Draft.from_folder(tmp_path) is None
        write_fields(tmp_path, foreign)
        assert self.cases.Draft.from_folder(tmp_path) is None
        with pytest.raises(ArtifactError, match=f"is not an exported {self.cases.Draft.name} draft: it"):
            self.cases.Draft(self.new_config(init_from=tmp_path))

    def test_config_that_cannot_be_followed_is_refused_in_one_line(self, plain, damaged):
        changes, reason = damaged
        write_fields(plain, {**read_fields(plain), **changes})
        assert_damaged(self.cases.Draft, plain, reason)
