"""Proposals of drafts in blocks are those of the training forward: the tests that DFlash, DFlash2 and DSpark share.

A subclass of ``BlockProposalSuite`` names its module ``cases``.
"""

from dataclasses import replace
from itertools import chain
from typing import Any, ClassVar

import pytest
import torch

from spec_core import Draft, Proposer, TargetSpec
from spec_core.errors import ConfigError
from spec_core.records import StepOutput
from spec_kit.block_drafting import Blocks
from spec_kit.layers import TargetOps

from .dense_parts import Document
from .draft_batches import LLAMA3, make_batch, random_documents
from .draft_parts import make_ops, make_target

KNOWN = 11
PROMPT = 4


def extend(proposer: Proposer, document: Document, start: int, stop: int) -> None:
    """Positions start to stop, of which the last has no token behind it that the target has seen."""
    proposer.extend(document.ids[start + 1 : stop + 1].tolist(), document.states[start:stop])


def write_answer(
    draft: Draft, module: Any, target: TargetSpec, document: Document, rounds: list[int], num_guesses: int
) -> Document:
    """Write an answer into the document in rounds that accept so many of the proposer's guesses; return both."""
    proposer, read, known = draft.proposer(module, make_ops(target)), 0, PROMPT  # the answer's first token
    ids = document.ids.clone()
    for accepted in rounds:
        extend(proposer, replace(document, ids=ids), read, known)
        guesses = proposer.propose(num_guesses, 0.0, torch.Generator()).token_ids
        ids[known + 1 : known + 1 + accepted] = torch.tensor(guesses[:accepted])
        read, known = known, known + 1 + accepted
        ids[known] = 0 if accepted < num_guesses and guesses[accepted] == 1 else 1
    mask_T = torch.arange(known + 1) >= PROMPT
    return replace(document, ids=ids[: known + 1], states=document.states[: known + 1], mask=mask_T)


def assert_rounds_are_counted(
    draft: Draft, module: Any, target: TargetSpec, documents: list[Document], num_guesses: int
) -> StepOutput:
    """An evaluation of answers that were written in rounds counts these rounds; a step counts none."""
    rounds = [[2, 0, num_guesses, 1, num_guesses, 3], [0, 0, 1]]
    written = [
        write_answer(draft, module, target, document, accepted, num_guesses)
        for document, accepted in zip(documents, rounds, strict=True)
    ]
    batch, ops = replace(make_batch(written, [3, 0]), evaluates=True), make_ops(target)
    denominators = draft.denominators([batch.supervision(span) for span in batch.spans])
    with torch.no_grad():
        output = module(batch, denominators, ops)
    metrics, accepted = output.metrics(), [*chain(*rounds)]
    shares = [sum(number > place for number in accepted) / 9 for place in range(num_guesses)]
    assert metrics["acceptance_per_position"] == pytest.approx(shares)
    assert metrics["acceptance_length_rounds"] == pytest.approx(1 + sum(accepted) / 9)
    trained = module(replace(batch, evaluates=False), denominators, ops).metrics()
    assert "acceptance_per_position" not in trained
    return output


class BlockProposalSuite:
    cases: ClassVar[Any]
    longest: ClassVar[int] = 4
    """Guesses of the blocks that the draft is trained in."""
    first_guess: ClassVar[int] = 1
    """Index of the slot that makes a block's first guess; ``block_size`` also counts the slots before it."""

    @pytest.fixture
    def options(self) -> dict[str, object]:
        """Options of the draft under test; a subclass may have several."""
        return {}

    def target(self) -> TargetSpec:
        return make_target(rope=LLAMA3, embedding_scale=2.0)

    def config(self, guesses: int, options: dict[str, object]) -> Any:
        return self.cases.make_config(block_size=guesses + self.first_guess, **options)

    @pytest.fixture
    def document(self) -> Document:
        """Known tokens, and states of some more; one layer more is captured than any draft reads."""
        return random_documents(self.target(), [KNOWN + 20], 4, 6)[0]

    @pytest.fixture
    def proposer(self, options, document) -> Proposer:
        """A proposer that has read all known tokens but the last."""
        proposer = self.fresh_proposer(options)
        extend(proposer, document, 0, KNOWN - 1)
        return proposer

    def fresh_proposer(self, options: dict[str, object]) -> Proposer:
        target, config = self.target(), self.config(self.longest, options)
        return self.cases.Draft(config).proposer(self.cases.make_model(target, config), make_ops(target))

    def model(self, guesses: int, options: dict[str, object]) -> Any:
        """Return the module of the proposer's weights, for blocks of so many guesses."""
        return self.cases.make_model(self.target(), self.config(guesses, options))

    def scores(
        self, module: Any, ops: TargetOps, states_KH: torch.Tensor, before_K: torch.Tensor
    ) -> torch.Tensor:
        """[K, V']: what the probabilities are made of; ``before_K``: the tokens before the guessed ones."""
        return states_KH @ ops.head_VH[module.ids_V].T

    def forward_probs(
        self, options: dict[str, object], document: Document, guesses: tuple[int, ...], temperature: float
    ) -> torch.Tensor:
        """[K, V]: the training forward over the known tokens and then ``guesses``, in a block as long as these, the
        anchor at the last known one."""
        target = self.target()
        module, ops = self.model(len(guesses), options), make_ops(target)
        ids = torch.cat([document.ids[:KNOWN], torch.tensor(guesses)])
        extended = replace(
            document, ids=ids, states=document.states[: len(ids)], mask=torch.ones(len(ids)).bool()
        )
        blocks = Blocks(torch.tensor([KNOWN - 1]), torch.tensor([0]), torch.tensor([1]))
        states_KH = module.states(make_batch([extended], [0]), blocks, ops)[0, self.first_guess :]
        scores_KV = torch.full((len(guesses), 29), -torch.inf)
        scores_KV[:, module.ids_V] = self.scores(module, ops, states_KH, ids[KNOWN - 1 : -1])
        return (scores_KV / temperature).softmax(-1)

    @pytest.mark.parametrize("num_tokens", [1, 2, None])
    @pytest.mark.parametrize("cuts", [[10], [1, 9, 10], [3, 4, 10], list(range(1, 11))], ids=str)
    def test_guesses_equal_the_training_forward_over_what_was_drawn(
        self, options, document, num_tokens, cuts
    ):
        """The distribution that each guess comes with is the draft's: rejection sampling relies on it."""
        proposer, generator = self.fresh_proposer(options), torch.Generator().manual_seed(0)
        for start, stop in zip([0, *cuts], cuts, strict=False):
            extend(proposer, document, start, stop)
            drawn = proposer.propose(num_tokens or self.longest, 0.7, generator)
        expected = self.forward_probs(options, document, drawn.token_ids, 0.7)
        torch.testing.assert_close(drawn.probs_KV, expected, rtol=1e-4, atol=1e-6)
        greedy = proposer.propose(num_tokens or self.longest, 0.0, generator)
        assert greedy.probs_KV is None
        expected = self.forward_probs(options, document, greedy.token_ids, 1.0)
        assert greedy.token_ids == tuple(expected.argmax(-1).tolist())

    def test_evaluation_counts_the_rounds_of_the_proposer(self, options, monkeypatch):
        """All blocks are evaluated, however few a step trains, and some at a time like all at once."""
        target, losses = self.target(), list[float]()
        config = self.config(self.longest, {**options, "num_anchors": 1})
        module = self.cases.make_model(target, config)
        for at_once in (1024, 3):
            monkeypatch.setattr("spec_kit.block_drafting.backbone.MOST_AT_ONCE", at_once)
            documents = random_documents(target, [40, 12], 4, 6)
            draft = self.cases.Draft(config)
            output = assert_rounds_are_counted(draft, module, target, documents, self.longest)
            losses.append(output.loss.item())
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)

    def test_more_tokens_than_a_block_holds_are_refused_in_one_line(self, proposer):
        asked, size = self.longest + 1, self.longest + self.first_guess
        line = f"num_tokens={asked} asked of a draft with blocks of {size}; it guesses at most {self.longest}"
        with pytest.raises(ConfigError, match=line):
            proposer.propose(asked, 0.0, torch.Generator())

    def test_drawn_tokens_follow_their_probabilities(self, proposer):
        """Pairs of guesses: the chance of the second is the one after the first."""
        generator, rounds = torch.Generator().manual_seed(0), 2000
        counts, chances = torch.zeros(29, 29), torch.zeros(29, 29)
        for drawn in proposer.propose_all([proposer] * rounds, 2, 1.0, [generator] * rounds):
            one, two = drawn.token_ids
            counts[one, two] += 1
            chances[one] = drawn.probs_KV[0, one] * drawn.probs_KV[1]
        assert (counts / rounds - chances).abs().max() < 0.03
        assert (counts.sum(1) / rounds - drawn.probs_KV[0]).abs().max() < 0.04


class DependentProposalSuite(BlockProposalSuite):
    """Each guess depends on the one before."""

    def test_a_guess_depends_on_the_one_before(self, proposer):
        seen = {}
        for seed in range(60):
            drawn = proposer.propose(2, 3.0, torch.Generator().manual_seed(seed))
            seen.setdefault(drawn.token_ids[0], drawn.probs_KV[1])
        first, *others = seen.values()
        assert any(not torch.allclose(first, other, rtol=1e-2) for other in others)
