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

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from spec_core import Draft, DraftConfig, FindKernel, no_kernel, plugins
from spec_core.records import StepOutput
from spec_testing.conformance import forbidden, import_without_torch, sources
from spec_testing.divided_step import DividedStep, batches_of, divided_steps
from spec_testing.draft_export_suite import DraftExportSuite
from spec_testing.draft_workbench import (
    INEXPRESSIBLE,
    LENGTHS,
    Workbench,
    acceptance_length_of,
    assert_equal_states,
    assert_refusal,
    assert_same_gradients,
    assert_same_output,
    build,
)
from spec_testing.kernels import compared_kernels, drawing
from spec_testing.reference import reference_kernel
from spec_testing.toy_target import ToySample, toy_batch, toy_target

WIDTH = max(LENGTHS)
TOLERANCE = 5e-5
"""Tolerance relative to the largest gradient: float32 rounding of sums in a different order."""


class DraftSuite(DraftExportSuite):
    """Tests of a draft. A subclass must define the fixture ``draft``, which returns the plugin's class."""

    expresses: ClassVar[frozenset[str]] = frozenset()
    """Keys of ``INEXPRESSIBLE`` that this draft can express, so that it need not refuse such targets."""

    @pytest.fixture
    def division(
        self, draft: type[Draft], options: dict[str, object], others: Mapping[str, Tensor], tmp_path: Path
    ) -> list[DividedStep]:
        """Return a DividedStep for each strategy that can divide the draft over two ranks on this machine."""
        return divided_steps(draft, options, others, tmp_path)

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
        """D4: one forward pass touches every parameter; initial weights may make a gradient zero, as in LoRA."""
        samples = bench.samples()
        batch = toy_batch(samples, bench.schema)
        denominators = bench.denominators(samples)
        bench.forward_backward([batch], denominators)
        dead = [name for name, grad in bench.gradients().items() if not grad.any()]
        bench.use_large_weights().forward_backward([batch], denominators)
        gradients = bench.gradients()
        dead = [name for name in dead if not gradients[name].any()]
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
        tensors = bench.tensors
        theirs = (tensors.embedding_VH, tensors.head_VH, tensors.norm_H, *tensors.others.values())
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
