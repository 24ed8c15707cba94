"""Steps of drafts against dense float64 references: the tests that all drafts share.

A subclass of ``DraftStepSuite`` names its module ``cases``, which has ``Draft``, ``make_config``, ``make_model``
and ``run_dense``.
"""

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from spec_core import FindKernel, no_kernel

from .dense_parts import Document
from .draft_batches import GAPS, LENGTHS, random_documents, step_arguments
from .draft_parts import assert_gradients, gradients, make_ops, make_target


def run_reference(cases, module, documents, target):
    """Result and gradients in float64."""
    weights = {name: p.detach().double().requires_grad_() for name, p in module.named_parameters()}
    wide = [replace(document, states=document.states.double()) for document in documents]
    result = cases.run_dense(module, weights, wide, target)
    # Also without a single label every weight has its (zero) gradient.
    (result.loss + 0 * sum(weight.sum() for weight in weights.values())).backward()
    return result, {name: weight.grad for name, weight in weights.items()}


def assert_equals_the_reference(cases, module, documents, target, layout, tolerance=1e-9, reference=None):
    """Compare a step with the reference; ``layout``: gaps and padding, ``reference``: see ``run_reference``."""
    dtype = next(module.parameters()).dtype
    given = [replace(document, states=document.states.to(dtype)) for document in documents]
    batch, counts, ops = step_arguments(cases.Draft(module.config), target, given, *layout)
    output = module(batch, counts, ops)
    output.loss.backward()
    result, expected = reference or run_reference(cases, module, documents, target)
    assert counts.tolist() == pytest.approx(result.denominators, rel=1e-12)
    assert output.counts["accuracy"].tolist() == result.counted
    torch.testing.assert_close(output.loss.double(), result.loss.detach(), rtol=tolerance, atol=1e-12)
    assert_gradients(gradients(module), expected, tolerance)
    return output, result


def assert_each_precision(
    cases, config, target, documents, gaps=GAPS, kernels=(no_kernel, no_kernel), float32_tolerance=1e-4
):
    """A step in float64 and in float32, each with its kernels. Return the result, and the last module."""
    reference = run_reference(cases, cases.make_model(target, config), documents, target)
    tolerances = (torch.float64, 1e-9), (torch.float32, float32_tolerance)
    for kernel, (dtype, tolerance) in zip(kernels, tolerances, strict=True):
        module = cases.make_model(target, config, dtype, kernel=kernel)
        output, result = assert_equals_the_reference(
            cases, module, documents, target, (gaps, 0), tolerance, reference
        )
        assert output.loss.item() > 0.1
    return result, module


def assert_bfloat16_is_close(module, batch, counts, new_ops):
    """Compare a step in bfloat16 with the one in float32; ``new_ops(dtype)``: the target's part."""
    expected = module(batch, counts, new_ops(torch.float32)).loss
    half = module.to(torch.bfloat16)
    output = half(batch, counts, new_ops(torch.bfloat16))
    output.loss.backward()
    assert output.loss.dtype == torch.float32
    assert output.loss.item() == pytest.approx(expected.item(), rel=0.03)
    assert all(p.grad.dtype == torch.bfloat16 and p.grad.isfinite().all() for p in half.parameters())


def assert_same_without_gradients(module, arguments):
    """Without gradients a step has the same loss and metrics."""
    trained = module(*arguments)
    with torch.no_grad():
        evaluated = module(*arguments)
    assert not evaluated.loss.requires_grad
    assert torch.equal(evaluated.loss, trained.loss.detach())
    assert evaluated.metrics() == trained.metrics()


class DraftStepSuite:
    cases: ClassVar[Any]
    few_tokens: ClassVar[int] = 3
    """Size of a vocabulary in which guesses are right often enough for prefixes of every length."""
    of_few_tokens: ClassVar[dict[str, object]] = {}
    """Options of a draft for a vocabulary of ``few_tokens``."""
    checkpointed: ClassVar[Sequence[Mapping[str, object]]] = ({},)
    """Options of drafts whose activations are computed again in the backward pass."""
    kernels: ClassVar[Sequence[FindKernel]] = (no_kernel,)
    """Kernels with which the activations are computed again."""

    def documents(
        self, config: Any, lengths: list[int], seed: int, dtype: torch.dtype = torch.float64, **changes: Any
    ) -> list[Document]:
        """Return documents of as many captured layers as a step takes, and the input of the final norm."""
        return random_documents(make_target(**changes), lengths, seed, 4, dtype)

    def draw_config(self, draw: random.Random) -> Any:
        """Return a random configuration."""
        raise NotImplementedError

    def expected_metrics(self, result: Any) -> tuple[dict[str, list[float]], dict[str, float]]:
        """Return sums over the counted guesses at each place, and single numbers, by the names of their metrics."""
        raise NotImplementedError

    @pytest.fixture
    def options(self) -> dict[str, object]:
        """Options of the draft under test; a subclass may have several."""
        return {}

    @pytest.fixture
    def small_chunks(self, monkeypatch):
        """Several blocks to a chunk of attention, several chunks; gradients summed over several chunks of logits."""
        monkeypatch.setattr("spec_kit.block_drafting.attention.CHUNK_BLOCKS", 4)
        monkeypatch.setattr("spec_core.ops.CHUNK_BYTES", 0)

    @pytest.mark.parametrize("seed", range(5))
    def test_random_documents_and_layouts_equal_the_dense_reference(self, seed):
        draw = random.Random(seed)
        config, target = self.draw_config(draw), make_target()
        documents = self.documents(config, [draw.randint(1, 24) for _ in range(draw.randint(1, 5))], seed)
        documents[-1].mask[:] = draw.random() < 0.5
        layout = [draw.randint(0, 3) for _ in documents], draw.randint(0, 2)
        module = self.cases.make_model(target, config, torch.float64)
        assert_equals_the_reference(self.cases, module, documents, target, layout)

    def test_metrics_equal_the_dense_reference(self, options):
        self.assert_metrics(options)

    def assert_metrics(self, options: Mapping[str, object]) -> None:
        """A step on a vocabulary of few tokens has the metrics of the reference."""
        few = {"vocab_size": self.few_tokens, "eos_token_ids": (0,)}
        target = make_target(**few)
        config = self.cases.make_config(**options, **self.of_few_tokens)
        documents = self.documents(config, [60, 45, 7], 3, **few)
        module = self.cases.make_model(target, config, torch.float64)
        output, result = assert_equals_the_reference(self.cases, module, documents, target, ([0, 1, 0], 0))
        metrics, (sums, numbers) = output.metrics(), self.expected_metrics(result)
        for name, totals in sums.items():
            ratios = [total / count for total, count in zip(totals, result.counted, strict=True)]
            assert metrics[name] == pytest.approx(ratios, rel=1e-9), name
        for name, number in numbers.items():
            assert metrics[name] == pytest.approx(number, rel=1e-12), name

    def test_nothing_of_another_document_reaches_a_step(self, options):
        """Tokens behind the document, other documents and padding may be anything."""
        target, config = make_target(), self.cases.make_config(**options)
        module, documents = (
            self.cases.make_model(target, config, torch.float64),
            self.documents(config, [12, 10, 11], 4),
        )
        documents[0].mask[:], documents[2].mask[:] = False, False
        batch, counts, ops = step_arguments(self.cases.Draft(config), target, documents, [2, 0, 1])
        output = module(batch, counts, ops)
        output.loss.backward()
        expected = gradients(module)
        batch.hidden_TNH[:14] = -1e3
        batch.hidden_TNH[24:] = 1e3
        batch.input_ids_T[:14] = 5
        batch.input_ids_T[24:] = 7
        module.zero_grad()
        again = module(batch, counts, ops)
        again.loss.backward()
        torch.testing.assert_close(again.loss, output.loss, rtol=1e-12, atol=0)
        assert_gradients(gradients(module), expected, 1e-11)

    def test_bfloat16_stays_close_to_float32(self, options):
        target, config = make_target(), self.cases.make_config(**options)
        documents = self.documents(config, [40, 30], 5, torch.float32)
        batch, counts, _ = step_arguments(self.cases.Draft(config), target, documents)
        module = self.cases.make_model(target, config)
        assert_bfloat16_is_close(module, batch, counts, lambda dtype: make_ops(target, dtype))

    def test_evaluation_without_gradients_gives_the_same_numbers(self, options):
        target, config = make_target(), self.cases.make_config(**options)
        documents = self.documents(config, LENGTHS, 5, torch.float32)
        arguments = step_arguments(self.cases.Draft(config), target, documents, GAPS)
        assert_same_without_gradients(self.cases.make_model(target, config), arguments)

    def test_activations_that_are_computed_again_give_the_same_step(self):
        target = make_target()
        for options, kernel in itertools.product(self.checkpointed, self.kernels):
            config, steps = self.cases.make_config(**options), []
            documents = self.documents(config, LENGTHS, 3)
            for flag in (False, True):
                given = config.model_copy(update={"checkpoint_activations": flag})
                module = self.cases.make_model(target, given, torch.float64, kernel=kernel)
                output = module(*step_arguments(self.cases.Draft(given), target, documents, GAPS, 3))
                output.loss.backward()
                steps.append((output, gradients(module)))
            (plain, expected), (again, got) = steps
            assert again.loss.item() == pytest.approx(plain.loss.item(), rel=1e-12)
            assert_gradients(got, expected, 1e-12)
            assert all(torch.equal(again.counts[name], value) for name, value in plain.counts.items())
