"""Replays an answer: what our proposer guesses wherever an engine's drafter was asked."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from spec_core import Engine
from spec_core.records import SamplingParams
from spec_engine_hf.decoding import DraftSource
from spec_engine_hf.hf_model import HfModel
from spec_kit.targets.target_reader import read_target
from spec_testing import TransformersTarget

from .trained_drafts import Trained

NUM_DRAFT_TOKENS = 3


@dataclass(frozen=True)
class Step:
    theirs: tuple[int, ...]
    ours: tuple[int, ...]


class Replay:
    """One answer, with the states of its tokens at the inputs of all layers, [T, N + 1, H]."""

    def __init__(
        self,
        target: Path,
        draft: Path,
        prompt_length: int,
        tokens: Sequence[int],
        hidden_TNH: Tensor,
        *,
        first_without_state: bool = False,
    ) -> None:
        """``first_without_state``: the engine's draft reads the first token, too, with zeros as the state before."""
        self._tokens, self._known = tokens, prompt_length + 1
        model = HfModel(read_target(target), torch.device("cpu"), "float32")
        drafting = DraftSource.of_export(draft, model)
        self._proposer = drafting.new_proposer()
        self._hidden_TNH = hidden_TNH[:, list(drafting.layers)]
        self._proposed_for = 0
        if first_without_state:
            self._proposer.extend(tokens[:1], torch.zeros_like(self._hidden_TNH[:1]))

    def steps(self, guesses: Sequence[tuple[int, ...]]) -> list[Step]:
        steps = []
        for theirs in guesses:
            if self._known + len(theirs) >= len(self._tokens):
                break  # how many of the last ones were accepted, the answer's end does not tell
            steps.append(Step(theirs, self._propose(len(theirs))))
            following = self._tokens[self._known : self._known + len(theirs)]
            wrong = (i for i, (a, b) in enumerate(zip(theirs, following, strict=True)) if a != b)
            self._known += next(wrong, len(theirs)) + 1
        return steps

    def depths(self, num_guesses: int, reported: Sequence[int]) -> list[int]:
        """Return at which depth our proposer guesses each token of the answer, if each round has its guesses.

        Where a round would begin, a reported 0 is taken for a token that a prefill yielded.
        """
        start = self._known - 1
        depths = [0]
        while self._known < len(self._tokens):
            accepted = 0
            if reported[self._known - start] == 0:
                depths.append(0)
            else:
                following = self._tokens[self._known : self._known + num_guesses]
                pairs = zip(self._propose(num_guesses), following, strict=False)
                accepted = next((i for i, (a, b) in enumerate(pairs) if a != b), len(following))
                depths += [depth % (num_guesses + 1) for depth in range(1, accepted + 2)]
            self._known += accepted + 1
        return depths[: len(self._tokens) - start]

    def _propose(self, count: int) -> tuple[int, ...]:
        start, stop = self._proposed_for, self._known - 1
        self._proposer.extend(self._tokens[start + 1 : stop + 1], self._hidden_TNH[start:stop])
        self._proposed_for = stop
        return self._proposer.propose(count, 0.0, torch.Generator()).token_ids


def prefilled(depths: Sequence[int], num_guesses: int) -> int:
    """Return how many tokens after the first have no guess although no round before has accepted all guesses."""
    return sum(own == 0 and before != num_guesses for before, own in pairwise(depths))


def assert_depths_of_a_replay(served: Engine, trained: Trained, prefix_length: int) -> None:
    """Each token's guess depth is that of our own proposer, and the engine's rounds are those of the answers.

    24 requests share a prefix that the engine caches, some end at a stop token, and the KV cache is too small for all
    of them: the engine computes some again, and such a prefill yields a token without a guess.
    """
    draw = random.Random(1)
    prefix = [draw.randrange(3, 97) for _ in range(prefix_length)]
    prompts = [prefix + prompt for prompt in trained.prompts[:24]]
    sampling = SamplingParams(max_new_tokens=100, num_draft_tokens=NUM_DRAFT_TOKENS)
    served.load_draft(trained.folder)
    answers = served.generate(prompts, sampling)
    rounds = served.acceptance().rounds
    reference = TransformersTarget(trained.target)
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = [*prompt, *answer.token_ids]
        replay = Replay(trained.target, trained.folder, len(prompt), tokens, reference.hidden(tokens))
        assert list(answer.guess_depths) == replay.depths(NUM_DRAFT_TOKENS, answer.guess_depths)
    assert sum(answer.guess_depths.count(1) for answer in answers) == rounds
    early = sum(len(answer.token_ids) < sampling.max_new_tokens for answer in answers)
    again = sum(prefilled(answer.guess_depths, NUM_DRAFT_TOKENS) for answer in answers)
    print(f"{trained.name}: {rounds} rounds, {early} answers stopped, {again} tokens of a repeated prefill")
    assert sum(answer.cached_tokens for answer in answers) > 0
    assert early > 0
    assert again > 0
