"""DraftSuite tests the contract of spec_core.draft (D1–D15) on a small random target in memory.

::

    class TestMyDraft(DraftSuite):
        @pytest.fixture
        def draft(self) -> type[Draft]:
            return MyDraft

        @pytest.fixture
        def options(self) -> dict[str, object]:
            return {"num_steps": 3}

Losses are compared in float32: two divisions of one batch give losses that differ by rounding only.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from spec_core import Draft, DraftConfig, FindKernel, TargetSpec, no_kernel, plugins
from spec_core.errors import ArtifactError
from spec_core.records import StepOutput
from spec_testing.conformance import ConformanceSuite, forbidden, import_without_torch, sources
from spec_testing.divided_step import DividedStep, batches_of, divided_steps
from spec_testing.draft_workbench import (
    INEXPRESSIBLE,
    LENGTHS,
    NUM_PROPOSALS,
    Workbench,
    acceptance_length_of,
    ask,
    ask_together,
    assert_equal_states,
    assert_refusal,
    assert_same_gradients,
    assert_same_output,
    build,
    damage_folder,
    extend,
    extend_together,
    file_bytes,
    round_to,
    stored_dtype,
)
from spec_testing.kernels import compared_kernels, drawing
from spec_testing.reference import reference_kernel
from spec_testing.toy_target import ToySample, stored_toy_target, toy_batch, toy_target

WIDTH = max(LENGTHS)
TOLERANCE = 5e-5
"""Tolerance relative to the largest gradient: float32 rounding of sums in a different order."""


class DraftSuite(ConformanceSuite):
    """Tests of a draft. A subclass must define the fixture ``draft``, which returns the plugin's class."""

    expresses: ClassVar[frozenset[str]] = frozenset()
    """Keys of ``INEXPRESSIBLE`` that this draft can express, so that it need not refuse such targets."""

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
    def division(
        self, draft: type[Draft], options: dict[str, object], others: Mapping[str, Tensor], tmp_path: Path
    ) -> list[DividedStep]:
        """Return a DividedStep for each strategy that can divide the draft over two ranks on this machine."""
        return divided_steps(draft, options, others, tmp_path)

    @pytest.fixture
    def bench(
        self,
        draft: type[Draft],
        options: dict[str, object],
        target: TargetSpec,
        others: Mapping[str, Tensor],
    ) -> Workbench:
        """Return the workbench: the draft, built on the target."""
        instance = draft(draft.Config.model_validate({"name": draft.name, **options}))
        return build(instance, target, others=others)

    def supervised(self, last_known: int, position: int) -> list[int]:
        """Return the tokens to supervise so that ``accuracy[position]`` scores the guess after ``last_known``.

        Tokens, ``last_known`` too, are given by their index in the document.
        """
        return [last_known + 1 + position]

    def test_d1_imports_without_torch(self, draft: type[Draft]) -> None:
        """D1: the class imports without torch, and Config derives from DraftConfig."""
        import_without_torch(draft)
        assert issubclass(draft.Config, DraftConfig)
        assert plugins.load(Draft, draft.name) is draft

    def test_d1_holds_no_optimizer_collective_or_device(self, draft: type[Draft]) -> None:
        """D1: the plugin's code has no optimizer, no collective and no device string."""
        found = [f"{file.name}:{where}" for file, tree in sources(draft) for where in forbidden(tree)]
        assert not found, f"single-device code only, found {', '.join(found)}"

    @pytest.mark.parametrize("what", sorted(INEXPRESSIBLE))
    def test_d2_refuses_what_it_cannot_express(self, bench: Workbench, what: str, tmp_path: Path) -> None:
        """D2: a target that the draft cannot express raises a TargetError of one line."""
        assert_refusal(bench.draft, toy_target(tmp_path, **INEXPRESSIBLE[what]), what, what in self.expresses)

    def test_d2_features_of_an_accepted_target(self, bench: Workbench) -> None:
        """D2: for an accepted target, the features are ascending layers of the target, in the target's width."""
        bench.draft.check_target(bench.target)
        schema = bench.draft.required_features(bench.target)
        assert schema == bench.schema
        assert schema.hidden_size == bench.target.hidden_size
        assert max(schema.layers) <= bench.target.num_layers

    def test_d3_d14_parameters_are_what_is_trained(self, bench: Workbench) -> None:
        """D3, D14: parameters are as declared, float32, on the CPU and trained; state dicts can be loaded."""
        built = {name: tuple(value.shape) for name, value in bench.module.named_parameters()}
        assert dict(bench.draft.cost(bench.target).weight_shapes) in ({}, built)
        for name, parameter in bench.module.named_parameters():
            assert parameter.requires_grad, f"{name} is not trained: frozen tensors belong to ops"
            assert parameter.dtype == torch.float32
            assert parameter.device == torch.device("cpu")
        other = build(bench.draft, bench.target, 9, bench.tensors.others).module
        other.load_state_dict(bench.module.state_dict())
        assert_equal_states(other, bench.module)

    def test_d3_draws_weights_from_the_global_generator(self, bench: Workbench) -> None:
        """D3: the same seed of torch's global generator gives the same weights."""
        assert_equal_states(build(bench.draft, bench.target, 0, bench.tensors.others).module, bench.module)

    def test_d4_every_parameter_gets_a_gradient(self, bench: Workbench) -> None:
        """D4: one forward pass touches every parameter."""
        samples = bench.samples()
        bench.forward_backward([toy_batch(samples, bench.schema)], bench.denominators(samples))
        dead = [name for name, grad in bench.gradients().items() if not grad.any()]
        assert not dead, f"the gradient of {', '.join(dead)} is zero everywhere"

    @pytest.mark.parametrize("kernel", [no_kernel, reference_kernel], ids=["plain", "kernel"])
    def test_d4_empty_batch_touches_every_parameter(self, bench: Workbench, kernel: FindKernel) -> None:
        """D4, D5: a batch without supervised tokens adds 0 and gives every parameter its (zero) gradient."""
        samples = bench.samples()
        bench = bench.with_kernels(kernel)
        silent = [ToySample(s.sample_id, s.input_ids, s.hidden_TNH, s.loss_mask & False) for s in samples]
        for spans in range(3):
            batch = toy_batch(silent[:spans], bench.schema, width=4)
            output = bench.forward_backward([batch], bench.denominators(samples))
            assert output.loss.item() == 0
            assert all(not grad.any() for grad in bench.gradients().values())

    def test_d5_zero_denominator_is_a_zero_step(self, bench: Workbench) -> None:
        """D5: if no token of the global batch is supervised, loss and gradients are 0, not NaN."""
        samples = [s for s in bench.samples() if not s.loss_mask.any()]
        denominators = bench.denominators(samples)
        assert not denominators.any()
        output = bench.forward_backward([toy_batch(samples, bench.schema)], denominators)
        assert output.loss.item() == 0
        assert all(not grad.any() for grad in bench.gradients().values())

    def test_d5_shares_add_up(self, lively: Workbench) -> None:
        """D5: loss, gradients, sums and counts do not depend on how the batch is divided into micro-batches."""
        samples = lively.samples()
        denominators = lively.denominators(samples)
        whole = lively.forward_backward([toy_batch(samples, lively.schema)], denominators)
        expected = lively.gradients()
        assert whole.loss.item() > 0
        assert whole.loss.isfinite()
        for size, width in ((1, WIDTH), (3, 0), (len(LENGTHS), WIDTH)):  # padded; packed; padded as one batch
            # From the other end, so that no cut is a prefix of the reference.
            cuts = [samples[::-1][i : i + size] for i in range(0, len(samples), size)]
            batches = [toy_batch(cut, lively.schema, width=width) for cut in cuts]
            got = lively.forward_backward(batches, denominators)
            assert_same_output(got, whole, TOLERANCE)
            assert_same_gradients(lively.gradients(), expected, TOLERANCE)

    def test_d11_the_targets_tensors_stay_the_targets(self, bench: Workbench) -> None:
        """D11: a non-persistent buffer equals a tensor of the target, and is not exported."""
        state = bench.module.state_dict()
        frozen = {name: value for name, value in bench.module.named_buffers() if name not in state}
        theirs = bench.tensors.others.values()
        for name, value in frozen.items():
            assert any(torch.equal(value, other) for other in theirs), f"{name} is no tensor of the target"
        exported = {name for name, _ in bench.draft.exported_tensors(state, bench.target)}
        assert not exported & frozen.keys()

    def test_d10_kernels_change_rounding_only(self, lively: Workbench) -> None:
        """D10: loss and gradients with a backend's kernels equal those without kernels, up to rounding."""
        samples = lively.samples()
        batches = [toy_batch(samples, lively.schema, width=8)]
        denominators = lively.denominators(samples)
        plain = lively.forward_backward(batches, denominators)
        expected = lively.gradients()
        fast = lively.with_kernels(reference_kernel)
        assert_same_output(fast.forward_backward(batches, denominators), plain, TOLERANCE)
        assert_same_gradients(fast.gradients(), expected, TOLERANCE)

    def test_d10_declares_its_kernels(self, draft: type[Draft], lively: Workbench) -> None:
        """D10: the draft requests only declared kernels; each agrees with its plain version on its examples."""
        asked: set[str] = set()
        lively.with_kernels(asked.add)
        declared = vars(draft.kernels()())
        assert asked <= declared.keys()
        plain = {name: version for name, version in declared.items() if version is not None}
        draw = drawing(torch.device("cpu"))
        assert draft.kernels().examples(draw).keys() == plain.keys()
        compared_kernels(plain.get, draft.kernels(), draw)
        compared_kernels(reference_kernel, draft.kernels(), draw)

    def test_d6_denominators_add_up(self, bench: Workbench) -> None:
        """D6: the global batch's denominators are the sum over its samples, in any order, without a model."""
        supervision = [sample.supervision for sample in bench.samples()]
        whole = bench.draft.denominators(supervision)
        assert whole.dtype == torch.float64
        assert whole.dim() == 1
        assert whole.device == torch.device("cpu")
        assert whole.any()
        singles = torch.stack([bench.draft.denominators([one]) for one in reversed(supervision)])
        torch.testing.assert_close(singles.sum(0), whole, rtol=1e-12, atol=0)
        assert not bench.draft.denominators([]).any()

    def test_d7_metrics_are_ratios_of_sums(self, bench: Workbench) -> None:
        """D7: ``acceptance_length`` and, per draft position, ``accuracy`` are among the metrics, in range."""
        samples = bench.samples()
        output = bench.forward_backward([toy_batch(samples, bench.schema)], bench.denominators(samples))
        assert output.sums.keys() == output.counts.keys()
        assert all(output.sums[name].shape == count.shape for name, count in output.counts.items())
        metrics = output.metrics()
        accuracy, length = metrics["accuracy"], metrics["acceptance_length"]
        assert isinstance(accuracy, list)
        assert all(0 <= share <= 1 for share in accuracy)
        assert isinstance(length, float)
        assert 1 <= length <= 1 + len(accuracy)

    def test_d7_loss_falls(self, bench: Workbench) -> None:
        """D7: on data in which each token determines the next, training lowers the loss and raises acceptance."""
        samples = bench.samples(LENGTHS[:3])
        batches = [toy_batch(samples, bench.schema)]
        denominators = bench.denominators(samples)
        optimizer = torch.optim.AdamW(bench.module.parameters(), lr=1e-2)
        outputs: list[StepOutput] = []
        for _ in range(15):
            outputs.append(bench.forward_backward(batches, denominators))
            optimizer.step()
        assert outputs[-1].loss < 0.5 * outputs[0].loss
        assert acceptance_length_of(outputs[-1]) > acceptance_length_of(outputs[0]) + 0.5

    def test_d12_only_judged_guesses_count(self, bench: Workbench) -> None:
        """D12: a draft that learns from guesses counts only verified ones; other drafts ignore guess depths."""
        plain, judged = bench.counts_of_rounds()
        expected = [2, 1, *[0] * len(plain)][: len(plain)]
        assert judged == (expected if bench.draft.learns_from_guesses else plain)

    def test_d13_divided_by_its_hints_a_step_is_the_same(self, division: list[DividedStep]) -> None:
        """D13: a step of two ranks that divide the draft differs from a step of one rank by rounding only."""
        for case in division:
            bench = case.bench()
            expected = bench.forward_backward(*batches_of(bench))
            for output, gradients in case.results():
                assert_same_output(output, expected, TOLERANCE)
                assert_same_gradients(gradients, bench.gradients(), TOLERANCE)

    def test_d15_a_longer_sample_costs_no_less(self, bench: Workbench) -> None:
        """D15: the cost of a sample is a positive integer, which does not fall with its length."""
        costs = [bench.draft.cost(bench.target).sample_flops(length, 4) for length in (4, 5, 100, 10_000)]
        assert costs == sorted(costs)
        assert all(type(cost) is int and cost > 0 for cost in costs)

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
