"""Steps of drafts in blocks: the tests that DFlash, DFlash2 and DSpark share."""

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from spec_core.records import StepOutput

from .dense_parts import Document
from .draft_batches import GAPS, LENGTHS, decode, give_anchors, make_batch, random_documents, step_arguments
from .draft_dflash.dense_reference import counted_slots
from .draft_parts import LargestOutput, assert_gradients, gradients, make_target, make_tensors
from .draft_steps import DraftStepSuite, assert_each_precision, assert_equals_the_reference


def one_block(mask: list[int], length: int = 9, seed: int = 4) -> Document:
    """A document of ``length`` tokens; the tokens in ``mask`` are supervised."""
    (document,) = random_documents(make_target(), [length], seed, 6, torch.float64)
    document.mask[:] = False
    document.mask[mask] = True
    return document


def train_on(cases: Any, documents: list[Document], config: Any) -> tuple[StepOutput, nn.Module]:
    """The output of one step in float64, and the module with its gradients."""
    module = cases.make_model(make_target(), config, torch.float64)
    output = module(*step_arguments(cases.Draft(config), make_target(), documents))
    output.loss.backward()
    return output, module


class BlockStepSuite(DraftStepSuite):
    of_few_tokens: ClassVar[dict[str, object]] = {"num_anchors": 40}
    first_guess: ClassVar[int] = 1
    """Index of the slot that makes a block's first guess; ``block_size`` also counts the slots before it."""

    measured: ClassVar[Sequence[Mapping[str, object]]] = ({},)
    """Options of drafts whose tensors are measured."""
    distilled: ClassVar[Sequence[Mapping[str, object]]] = ({},)
    """Options of drafts that are trained with Draft-OPD."""

    def documents(
        self, config: Any, lengths: list[int], seed: int, dtype: torch.dtype = torch.float64, **changes: Any
    ) -> list[Document]:
        """Return documents of as many captured layers as a step takes: five, and the input of the final norm."""
        return random_documents(make_target(**changes), lengths, seed, 6, dtype)

    def random_options(self, draw: random.Random, guesses: int) -> dict[str, object]:
        """Return options, besides blocks of so many guesses and their number, for a step that is drawn."""
        return {}

    def draw_config(self, draw: random.Random) -> Any:
        guesses = draw.randint(1, 8)
        options = {"block_size": guesses + self.first_guess, "num_anchors": draw.choice([1, 3, 50])}
        return self.cases.make_config(**options, **self.random_options(draw, guesses))

    def expected_metrics(self, result: Any) -> tuple[dict[str, list[float]], dict[str, float]]:
        assert {1, 2, 3} <= set(result.lengths)
        return {"accuracy": result.correct}, {"acceptance_length": sum(result.lengths) / len(result.lengths)}

    def assert_case(self, options: dict[str, object], changes: dict[str, object]) -> tuple[Any, nn.Module]:
        """A step in each precision. Return the configuration, and the module of float32 with its gradients."""
        config = self.cases.make_config(**options)
        documents = self.documents(config, LENGTHS, 5, torch.float32, **changes)
        _, module = assert_each_precision(self.cases, config, make_target(**changes), documents)
        return config, module

    def test_guesses_that_were_judged_equal_the_dense_reference(self, options):
        """Rounds of three guesses: blocks of two train two of them, blocks of five all three."""
        for guesses in (2, 5):
            self.assert_judged(options, guesses)

    @pytest.mark.usefixtures("small_chunks")
    def test_draft_opd_equals_the_dense_reference(self):
        for options, guesses in itertools.product(self.distilled, (2, 5)):
            result = self.assert_judged({**options, "opd": True}, guesses)
            assert min(result.denominators[-2:]) > 1

    def assert_judged(self, options: Mapping[str, object], guesses: int) -> Any:
        """A step on an engine's rounds of three guesses equals the reference; return the reference's result."""
        config = self.cases.make_config(**options, block_size=guesses + self.first_guess, num_anchors=50)
        target, documents = make_target(), self.judged_documents(config, guesses)
        for document in documents:
            document.anchors = [
                last for last in document.rounds if counted_slots(document, last, guesses + 1)
            ]
        module = self.cases.make_model(target, config, torch.float64)
        _, result = assert_equals_the_reference(self.cases, module, documents, target, (GAPS, 0))
        assert [count > 0 for count in result.counted] == [place < 3 for place in range(guesses)]
        return result

    def judged_documents(self, config: Any, seed: int) -> list[Document]:
        documents = self.documents(config, LENGTHS, 5)
        decode(documents, seed=seed)
        return documents

    def test_an_evaluation_has_the_same_loss_with_draft_opd(self):
        """Its batches say nothing of guesses, so there is nothing to judge."""
        for options in self.distilled:
            target, losses = make_target(), []
            for opd in (False, True):
                config = self.cases.make_config(**options, opd=opd)
                documents = self.documents(self.cases.make_config(**options, opd=True), LENGTHS, 5)
                batch, counts, ops = step_arguments(self.cases.Draft(config), target, documents)
                module = self.cases.make_model(target, config, torch.float64)
                losses.append(module(replace(batch, evaluates=True), counts, ops).loss.item())
            assert losses[0] == losses[1] > 0.1

    def test_four_ranks_take_the_same_step(self, options):
        """Rank r trains every fourth sample; three of six have more anchors than are drawn. Ids stay,
        and the denominator is the global batch's."""
        config = self.cases.make_config(**options, num_anchors=4)
        self.assert_four_ranks(config, self.documents(config, LENGTHS, 5))

    def test_four_ranks_take_the_same_step_with_draft_opd(self):
        for options in self.distilled:
            config = self.cases.make_config(**options, opd=True)
            self.assert_four_ranks(config, self.judged_documents(config, 5))

    def assert_four_ranks(self, config: Any, documents: list[Document]) -> None:
        target = make_target()
        module = self.cases.make_model(target, config, torch.float64)
        batch, counts, ops = step_arguments(self.cases.Draft(config), target, documents, GAPS)
        whole = module(batch, counts, ops)
        whole.loss.backward()
        expected = gradients(module)
        module.zero_grad()
        ids = list(range(len(documents)))[::-1]
        parts = [ids[rank::4] for rank in range(4)]
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
        documents = self.documents(config, lengths, 1, torch.float32)
        for document in documents:
            document.mask[:] = torch.arange(len(document.mask)) % 2 == 0
        batch, counts, ops = step_arguments(self.cases.Draft(config), target, documents)
        for count in (0.0, 7.0):
            module.zero_grad()
            output = module(batch, torch.full_like(counts, count), ops)
            output.loss.backward()
            assert output.loss.item() == 0
            assert all(p.grad is not None and not p.grad.any() for p in module.parameters())

    def test_nothing_of_another_document_reaches_a_step(self, options):
        """Tokens behind the document, other documents and padding may be anything; features from the anchor on, too,
        but for the teacher's."""
        target, config = make_target(), self.cases.make_config(**options, num_anchors=1)
        module = self.cases.make_model(target, config, torch.float64)
        draft, documents = self.cases.Draft(config), self.documents(config, [12, 10, 11], 4)
        for document in documents:
            document.mask[:] = False
        documents[1].mask[7:] = True
        batch, counts, ops = step_arguments(draft, target, documents, [2, 0, 1])
        give_anchors(draft, documents)
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

    def test_a_guess_counts_while_all_labels_before_it_are_supervised(self):
        """DeepSpec's product over the labels' mask; speculators takes the mask of the slot's input, ModelOpt the
        label's alone: both count the last label here."""
        output, _ = train_on(self.cases, [one_block([2, 3, 4, 6])], self.cases.make_config())
        assert output.counts["accuracy"].tolist()[:3] == [2, 1, 0]
        assert not output.counts["accuracy"][3:].any()

    def test_labels_lie_in_the_document(self):
        """Labels of speculators may lie in the next document of a packed row."""
        documents = [one_block([2, 3, 4], length=5), one_block([], seed=5)]
        output, _ = train_on(self.cases, documents, self.cases.make_config())
        assert output.counts["accuracy"].tolist()[:3] == [2, 1, 0]
        assert not output.counts["accuracy"][3:].any()

    def test_anchors_may_stand_at_the_end(self):
        """DeepSpec excludes no anchor whose block is cut short; speculators drops those of a pack's last slots."""
        draft, document = self.cases.Draft(self.cases.make_config()), one_block([7, 8])
        give_anchors(draft, [document])
        assert document.anchors == [7]

    def test_embedding_and_head_are_the_targets_and_not_trained(self):
        module = self.cases.make_model(make_target(), self.cases.make_config())
        shapes = {tuple(parameter.shape) for parameter in module.parameters()}
        assert tuple(make_tensors(make_target()).head_VH.shape) not in shapes

    def test_no_tensor_is_as_large_as_guesses_times_vocabulary_or_times_context(self, monkeypatch):
        monkeypatch.setattr("spec_core.ops.CHUNK_BYTES", 1 << 18)
        monkeypatch.setattr("spec_kit.block_drafting.attention.CHUNK_BLOCKS", 8)
        num_tokens, guesses, size = 400, 7, {"vocab_size": 1009}
        for options in self.measured:
            sizes = {"block_size": guesses + self.first_guess, "num_layers": 1, "num_anchors": 10_000}
            target, config = make_target(**size), self.cases.make_config(**sizes, **options)
            documents = self.documents(config, [num_tokens], 1, torch.float32, **size)
            module = self.cases.make_model(target, config)
            arguments = step_arguments(self.cases.Draft(config), target, documents)
            with LargestOutput() as largest:
                module(*arguments).loss.backward()
            assert largest.numel < num_tokens * guesses * target.vocab_size / 20
            assert largest.numel < num_tokens * guesses * num_tokens / 10
