"""Steps of drafts in blocks against the dense float64 reference: the tests that DFlash, DFlash2 and DSpark share.

A subclass of ``BlockStepSuite`` names its ``cases`` module and its dense reference.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch

from .draft_dflash.cases import decode, make_batch, random_documents
from .draft_dflash.dense_reference import counted_slots
from .draft_parts import (
    assert_bfloat16_is_close,
    assert_gradients,
    assert_same_without_gradients,
    gradients,
    make_ops,
    make_target,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from .draft_dflash.dense_reference import Document

LENGTHS = [9, 1, 14, 2, 3, 23]
GAPS = [0, 2, 0, 3, 1, 4]


class BlockStepSuite:
    cases: ClassVar[Any]
    """Module with ``make_config``, ``make_model``, ``make_setting``, ``make_parts``, ``give_anchors`` and
    ``denominators``."""
    dense: ClassVar[Any]
    """Static method: the step by weights, documents, the setting and the parts."""
    first_guess: ClassVar[int] = 1
    """Slot of a block whose guess is its first: ``block_size`` counts those before it."""

    of_few_tokens: ClassVar[dict[str, object]] = {}
    """Options for a vocabulary of three tokens."""

    def documents(
        self, config: Any, target: Any, lengths: Sequence[int], seed: int, dtype: torch.dtype = torch.float64
    ) -> list[Document]:
        """Return documents of as many captured layers as a step takes: five, and the input of the final norm."""
        return random_documents(target, list(lengths), seed, 6, dtype)

    def random_options(self, draw: random.Random, guesses: int) -> dict[str, object]:
        """Return options, besides blocks of so many guesses and their number, for a step that is drawn."""
        return {}

    def expected_metrics(self, result: Any) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
        """Return sums for each guess, and lengths of all blocks, by the names of their metrics."""
        return {"accuracy": result.correct}, {"acceptance_length": result.lengths}

    @pytest.fixture
    def options(self) -> dict[str, object]:
        """Options of the draft under test; a subclass may have several."""
        return {}

    @pytest.fixture
    def small_chunks(self, monkeypatch):
        """Several blocks to a chunk of attention, several chunks; gradients summed over several chunks of logits."""
        monkeypatch.setattr("spec_kit.block_drafting.attention.CHUNK_BLOCKS", 4)
        monkeypatch.setattr("spec_core.ops.CHUNK_BYTES", 0)

    def run_reference(self, module, documents, target):
        """Result and gradients in float64."""
        cases = self.cases
        if documents[0].rounds is None:
            cases.give_anchors(module.config, documents)
        weights = {name: p.detach().double().requires_grad_() for name, p in module.named_parameters()}
        wide = [replace(document, states=document.states.double()) for document in documents]
        setting = cases.make_setting(target, module, torch.float64)
        result = self.dense(weights, wide, setting, cases.make_parts(module))
        (result.loss + 0 * sum(weight.sum() for weight in weights.values())).backward()
        return result, {name: weight.grad for name, weight in weights.items()}

    def assert_equals_the_reference(self, module, documents, target, layout, tolerance=1e-9, reference=None):
        """One step of ours in the batch ``layout``: (gaps, padding); ``reference``: of ``run_reference``."""
        dtype = next(module.parameters()).dtype
        counts = self.cases.denominators(module.config, documents)
        given = [replace(document, states=document.states.to(dtype)) for document in documents]
        output = module(make_batch(given, *layout), counts, make_ops(target, dtype))
        output.loss.backward()
        result, expected = reference or self.run_reference(module, documents, target)
        assert counts.item() == pytest.approx(result.denominator, rel=1e-12)
        assert output.counts["accuracy"].tolist() == result.counted
        torch.testing.assert_close(output.loss.double(), result.loss.detach(), rtol=tolerance, atol=1e-12)
        if any(result.counted):
            assert_gradients(gradients(module), expected, tolerance)
        return output, result

    def assert_case(self, options: dict[str, object], changes: dict[str, object]) -> tuple[Any, nn.Module]:
        """A step in each precision. Return the configuration, and the module of float32 with its gradients."""
        target, config = make_target(**changes), self.cases.make_config(**options)
        documents = self.documents(config, target, LENGTHS, 5, torch.float32)
        reference = self.run_reference(self.cases.make_model(target, config), documents, target)
        for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
            module = self.cases.make_model(target, config, dtype)
            output, _ = self.assert_equals_the_reference(
                module, documents, target, (GAPS, 0), tolerance, reference
            )
            assert output.loss.item() > 0.1
        assert max(len(document.anchors) for document in documents) == 6
        return config, module

    @pytest.mark.parametrize("seed", range(4))
    def test_random_documents_and_layouts_equal_the_dense_reference(self, seed):
        draw = random.Random(seed)
        guesses = draw.randint(1, 8)
        config = self.cases.make_config(
            block_size=guesses + self.first_guess,
            num_anchors=draw.choice([1, 3, 50]),
            **self.random_options(draw, guesses),
        )
        target, lengths = make_target(), [draw.randint(1, 24) for _ in range(draw.randint(1, 5))]
        documents = self.documents(config, target, lengths, seed)
        documents[-1].mask[:] = draw.random() < 0.5
        layout = [draw.randint(0, 3) for _ in lengths], draw.randint(0, 2)
        module = self.cases.make_model(target, config, torch.float64)
        self.assert_equals_the_reference(module, documents, target, layout)

    def test_guesses_that_were_judged_equal_the_dense_reference(self, options):
        """Rounds of three guesses: blocks of two train two of them, blocks of five all three."""
        for guesses in (2, 5):
            config = self.cases.make_config(**options, block_size=guesses + self.first_guess, num_anchors=50)
            target = make_target()
            documents = self.documents(config, target, LENGTHS, 5)
            decode(documents, seed=guesses)
            for document in documents:
                document.anchors = [
                    last for last in document.rounds if counted_slots(document, last, guesses + 1)
                ]
            module = self.cases.make_model(target, config, torch.float64)
            _, result = self.assert_equals_the_reference(module, documents, target, (GAPS, 0))
            assert [count > 0 for count in result.counted] == [place < 3 for place in range(guesses)]

    def test_metrics_equal_the_dense_reference(self, options):
        """Three tokens: guesses are right often enough for prefixes of every length."""
        target = make_target(vocab_size=3, eos_token_ids=(0,))
        config = self.cases.make_config(**options, **self.of_few_tokens, num_anchors=40)
        documents = self.documents(config, target, [60, 45, 7], 3)
        module = self.cases.make_model(target, config, torch.float64)
        output, result = self.assert_equals_the_reference(module, documents, target, ([0, 1, 0], 0))
        assert {1, 2, 3} <= set(result.lengths)
        metrics, (sums, lengths) = output.metrics(), self.expected_metrics(result)
        for name, totals in sums.items():
            ratios = [total / count for total, count in zip(totals, result.counted, strict=True)]
            assert metrics[name] == pytest.approx(ratios, rel=1e-9), name
        for name, each in lengths.items():
            assert metrics[name] == pytest.approx(sum(each) / len(each), rel=1e-12), name

    def test_any_number_of_ranks_takes_the_same_step(self, options, num_ranks=4):
        """Rank r trains every ``num_ranks``-th sample; three of six have more anchors than are drawn. Ids stay,
        and the denominator is the global batch's."""
        target, config = make_target(), self.cases.make_config(**options, num_anchors=4)
        module = self.cases.make_model(target, config, torch.float64)
        documents = self.documents(config, target, LENGTHS, 5)
        counts, ops = self.cases.denominators(config, documents), make_ops(target, torch.float64)
        whole = module(make_batch(documents, GAPS), counts, ops)
        whole.loss.backward()
        expected = gradients(module)
        module.zero_grad()
        ids = list(range(len(documents)))[::-1]
        parts = [ids[rank::num_ranks] for rank in range(num_ranks)]
        shares = [
            module(make_batch([documents[i] for i in part], [6] * len(part), ids=part), counts, ops)
            for part in parts
        ]
        total = sum(shares[1:], shares[0])
        total.loss.backward()
        torch.testing.assert_close(total.loss, whole.loss, rtol=1e-12, atol=0)
        assert_gradients(gradients(module), expected, 1e-12)
        for name, value in whole.sums.items():
            torch.testing.assert_close(total.sums[name].double(), value.double(), rtol=1e-12, atol=1e-12)
            assert torch.equal(total.counts[name], whole.counts[name])

    @pytest.mark.parametrize("lengths", [[1], [2, 1], [9, 4]], ids=str)
    def test_batch_without_anchors_gives_zero_loss_and_zero_gradients(self, options, lengths):
        """Every other token is supervised: there are labels, but no anchor has one behind it."""
        target, config = make_target(), self.cases.make_config(**options)
        module = self.cases.make_model(target, config)
        documents = self.documents(config, target, lengths, 1, torch.float32)
        for document in documents:
            document.mask[:] = torch.arange(len(document.mask)) % 2 == 0
        for count in (0.0, 7.0):
            module.zero_grad()
            output = module(
                make_batch(documents, [0] * len(lengths)),
                torch.tensor([count], dtype=torch.float64),
                make_ops(target),
            )
            output.loss.backward()
            assert output.loss.item() == 0
            assert all(p.grad is not None and not p.grad.any() for p in module.parameters())

    def test_nothing_of_another_document_reaches_a_block(self, options):
        """Tokens behind the document, other documents and padding may be anything; features from the anchor on, too,
        but for the teacher's."""
        target, config = make_target(), self.cases.make_config(**options, num_anchors=1)
        module = self.cases.make_model(target, config, torch.float64)
        ops, documents = make_ops(target, torch.float64), self.documents(config, target, [12, 10, 11], 4)
        for document in documents:
            document.mask[:] = False
        documents[1].mask[7:] = True
        counts, batch = self.cases.denominators(config, documents), make_batch(documents, [2, 0, 1])
        self.cases.give_anchors(config, documents)
        output = module(batch, counts, ops)
        output.loss.backward()
        expected = gradients(module)
        (anchor,) = documents[1].anchors
        batch.hidden_TNH[:14] = -1e3
        batch.hidden_TNH[24:] = 1e3
        batch.hidden_TNH[14 + anchor :, :5] = 1e3
        batch.input_ids_T[:14] = 5
        batch.input_ids_T[24:] = 7
        module.zero_grad()
        again = module(batch, counts, ops)
        again.loss.backward()
        assert torch.equal(again.loss, output.loss)
        assert_gradients(gradients(module), expected, 0)
        batch.hidden_TNH[14 + anchor - 1] += 1
        assert not torch.equal(module(batch, counts, ops).loss, output.loss)

    def test_bfloat16_stays_close_to_float32(self, options):
        target, config = make_target(), self.cases.make_config(**options)
        documents = self.documents(config, target, [40, 30], 5, torch.float32)
        batch, counts = make_batch(documents, [0, 0]), self.cases.denominators(config, documents)
        module = self.cases.make_model(target, config)
        assert_bfloat16_is_close(module, batch, counts, lambda dtype: make_ops(target, dtype))

    def test_evaluation_without_gradients_gives_the_same_numbers(self, options):
        target, config = make_target(), self.cases.make_config(**options)
        documents = self.documents(config, target, LENGTHS, 5, torch.float32)
        arguments = make_batch(documents, GAPS), self.cases.denominators(config, documents), make_ops(target)
        assert_same_without_gradients(self.cases.make_model(target, config), arguments)
