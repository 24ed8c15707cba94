"""DraftExportSuite has the tests of DraftSuite on exported folders (D8) and on proposals (D9), and their fixtures."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from spec_core import Draft, TargetSpec
from spec_core.errors import ArtifactError
from spec_testing.conformance import ConformanceSuite
from spec_testing.draft_workbench import (
    NUM_PROPOSALS,
    Workbench,
    ask,
    ask_together,
    assert_equal_states,
    build,
    damage_folder,
    extend,
    extend_together,
    file_bytes,
    round_to,
    stored_dtype,
)
from spec_testing.toy_target import stored_toy_target


class DraftExportSuite(ConformanceSuite):
    """Tests of what a draft exports and proposes, and the fixtures of all tests of a draft."""

    @pytest.fixture
    def draft(self) -> type[Draft]:
        """Return the plugin's class; every subclass must override this fixture."""
        raise pytest.UsageError("a DraftSuite needs a fixture 'draft' that returns the plugin's class")

    @pytest.fixture
    def options(self) -> dict[str, object]:
        """Return options of section ``draft`` besides ``name``."""
        return {}

    @pytest.fixture
    def target(self, tmp_path: Path) -> TargetSpec:
        """Return the small random target."""
        return stored_toy_target(tmp_path / "target")

    @pytest.fixture
    def lively(self, bench: Workbench) -> Workbench:
        """Return the workbench with weights as large as trained ones."""
        return bench.use_large_weights()

    @pytest.fixture
    def others(self, target: TargetSpec) -> Mapping[str, Tensor]:
        """Return the tensors that ``Draft.target_tensors`` names. The draft gets only these (D11)."""
        return {}

    @pytest.fixture
    def bench(
        self, draft: type[Draft], options: dict[str, object], target: TargetSpec, others: Mapping[str, Tensor]
    ) -> Workbench:
        """Return the workbench: the draft, built on the target."""
        instance = draft(draft.Config.model_validate({"name": draft.name, **options}))
        return build(instance, target, others=others)

    def supervised(self, last_known: int, position: int) -> list[int]:
        """Return the tokens to supervise so that ``accuracy[position]`` scores the guess after ``last_known``.

        Tokens, ``last_known`` too, are given by their index in the document.
        """
        return [last_known + 1 + position]

    def test_d8_export_comes_back(self, lively: Workbench, tmp_path: Path) -> None:
        """D8: a draft that is exported, recognised and built again has the same weights, proposals and export."""
        again = build(lively.export(tmp_path / "first"), lively.target, 9, lively.tensors.others)
        stored = stored_dtype(tmp_path / "first")
        state = {name: round_to(value, stored) for name, value in lively.module.state_dict().items()}
        lively.module.load_state_dict(state)
        assert_equal_states(again.module, lively.module)
        for context in lively.contexts():
            assert again.propose(context).token_ids == lively.propose(context).token_ids
        again.export(tmp_path / "second")
        assert file_bytes(tmp_path / "first") == file_bytes(tmp_path / "second")

    def test_d8_export_is_two_files(self, bench: Workbench, tmp_path: Path) -> None:
        """D8: an export has exactly the files config.json and model.safetensors."""
        bench.export(tmp_path / "out")
        assert sorted(file_bytes(tmp_path / "out")) == ["config.json", "model.safetensors"]

    def test_d8_tensors_can_be_had_without_a_folder(self, bench: Workbench, tmp_path: Path) -> None:
        """D8: ``exported_tensors`` yields the names, dtypes and values of the exported file."""
        from safetensors.torch import load_file

        bench.export(tmp_path / "out")
        stored = load_file(tmp_path / "out" / "model.safetensors")
        exported = list(bench.draft.exported_tensors(bench.module.state_dict(), bench.target))
        assert sorted(name for name, _ in exported) == sorted(stored)
        for name, tensor in exported:
            assert tensor.dtype == stored[name].dtype
            assert torch.equal(tensor, stored[name]), f"{name} differs from the folder's"

    def test_d8_other_folders_are_not_its_own(self, bench: Workbench, tmp_path: Path) -> None:
        """D8: ``from_folder`` returns None for the folder of another algorithm."""
        (tmp_path / "config.json").write_text('{"architectures": ["OfOthers"], "model_type": "else"}')
        assert type(bench.draft).from_folder(tmp_path) is None

    @pytest.mark.parametrize("damage", ["no tensors", "cut tensors", "a field less"])
    def test_d8_damaged_folder_is_refused(self, bench: Workbench, damage: str, tmp_path: Path) -> None:
        """D8: ``from_folder`` raises ArtifactError, one line, for a damaged folder of this algorithm."""
        folder = tmp_path / "out"
        bench.export(folder)
        damage_folder(folder, damage)
        with pytest.raises(ArtifactError) as refusal:
            type(bench.draft).from_folder(folder)
        assert len(str(refusal.value).splitlines()) == 1

    def test_d9_proposals_are_the_modules_own(self, lively: Workbench) -> None:
        """D9: the module's forward pass counts guess k as accepted if the target predicts it, else as refused."""
        for context in lively.contexts():
            proposals = lively.propose(context).token_ids
            assert len(proposals) == NUM_PROPOSALS
            for position, token in enumerate(proposals):
                supervised = self.supervised(len(context.input_ids) - 1, position)
                for following, accepted in ((token, 1.0), ((token + 1) % lively.target.vocab_size, 0.0)):
                    output = lively.judge(context, [*proposals[:position], following], supervised)
                    assert output.counts["accuracy"][position].item() == 1
                    assert output.sums["accuracy"][position].item() == accepted

    def test_d9_longest_proposal(self, lively: Workbench) -> None:
        """D9: a proposal has as many tokens as requested, up to ``max_draft_tokens``."""
        most = lively.draft.max_draft_tokens or 2 * NUM_PROPOSALS
        assert most >= max(NUM_PROPOSALS, lively.draft.default_draft_tokens)
        proposer = lively.draft.proposer(lively.module, lively.ops)
        extend(proposer, lively.contexts()[0], 0, 8)
        for num_tokens in (0, most):
            assert len(proposer.propose(num_tokens, 0.0, torch.Generator()).token_ids) == num_tokens

    def test_d9_extending_in_parts_changes_nothing(self, lively: Workbench) -> None:
        """D9: guesses do not depend on how states are split over calls of ``extend``, or on earlier proposals."""
        for context in lively.contexts():
            proposer = lively.draft.proposer(lively.module, lively.ops)
            for start, stop in ((0, 1), (1, 5), (5, 8)):
                extend(proposer, context, start, stop)
                ask(proposer)
            assert ask(proposer).token_ids == ask(proposer).token_ids == lively.propose(context).token_ids

    def test_d9_several_sequences_at_once(self, lively: Workbench) -> None:
        """D9: several sequences of different lengths, drafted together, get the same guesses as each alone."""
        contexts = [context for context, _ in zip(itertools.cycle(lively.contexts()), range(3), strict=False)]
        alone = [lively.draft.proposer(lively.module, lively.ops) for _ in contexts]
        together = [lively.draft.proposer(lively.module, lively.ops) for _ in contexts]
        for starts, stops in (((0, 0, 0), (2, 1, 5)), ((2, 1, 5), (8, 3, 6))):
            for one in zip(alone, contexts, starts, stops, strict=True):
                extend(*one)
            extend_together(together, contexts, starts, stops)
        for temperature in (0.0, 1.0):
            expected = [ask(proposer, temperature).token_ids for proposer in alone]
            assert [proposal.token_ids for proposal in ask_together(together, temperature)] == expected

    def test_d9_sampled_proposals_come_with_their_probabilities(self, lively: Workbench) -> None:
        """D9: guesses come with distributions, float32 [K, V], and depend only on these and the generator."""
        proposer = lively.draft.proposer(lively.module, lively.ops)
        extend(proposer, lively.contexts()[0], 0, 8)
        first, second = ask(proposer, temperature=1.0), ask(proposer, temperature=1.0)
        assert first.token_ids == second.token_ids
        if first.probs_KV is None:
            assert first.token_ids == ask(proposer).token_ids
            return
        assert first.probs_KV.dtype == torch.float32
        assert first.probs_KV.shape == (NUM_PROPOSALS, lively.target.vocab_size)
        torch.testing.assert_close(first.probs_KV.sum(-1), torch.ones(NUM_PROPOSALS))
        assert all(probs_V[token] > 0 for probs_V, token in zip(first.probs_KV, first.token_ids, strict=True))
