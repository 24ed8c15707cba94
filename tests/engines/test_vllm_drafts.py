"""vLLM serves a draft as it was exported: the same text, the same guesses, the same acceptance."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch

from spec_backend_cpu.backend import CpuBackend
from spec_core.engine import EngineContext
from spec_core.records import SamplingParams
from spec_engine_hf.decoding import DraftSource
from spec_engine_hf.engine import HfConfig, HfEngine
from spec_engine_hf.hf_model import HfModel
from spec_kit.targets.target_reader import read_target

from ..transformers_target import Transformer
from .conftest import DRAFTS, NEW_TOKENS, NUM_DRAFT_TOKENS
from .vllm_here import needs_vllm

if TYPE_CHECKING:
    from pathlib import Path

    from .conftest import Trained

pytestmark = [*needs_vllm, pytest.mark.xdist_group("drafts")]

DRAFTED = SamplingParams(max_new_tokens=NEW_TOKENS, num_draft_tokens=NUM_DRAFT_TOKENS, stop_at_eos=False)
PLAIN = SamplingParams(max_new_tokens=NEW_TOKENS, stop_at_eos=False)


@pytest.fixture(params=sorted(DRAFTS))
def trained(request, trained_draft) -> Trained:
    return trained_draft(request.param)


@pytest.mark.timeout(900)  # trains, starts vLLM, and decodes 5,000 tokens in two engines
def test_the_draft_is_served_with_the_acceptance_of_the_reference(trained, sharing_engine) -> None:
    """Greedy text with the draft is the plain greedy text, and both engines accept alike, over 5,000 tokens."""
    served = sharing_engine(trained.target)
    plain = served.generate(trained.prompts, PLAIN)
    assert sum(len(answer.token_ids) for answer in plain) >= 5000
    served.load_draft(trained.folder)
    drafted = served.generate(trained.prompts, DRAFTED)
    assert [answer.token_ids for answer in drafted] == [answer.token_ids for answer in plain]
    context = EngineContext(backend=CpuBackend(CpuBackend.Config()))
    with HfEngine.create(HfConfig(), read_target(trained.target), context) as reference:
        reference.load_draft(trained.folder)
        reference.generate(trained.prompts, DRAFTED)
        expected, counted = reference.acceptance(), served.acceptance()
    print(f"{trained.name}: {expected=} {counted=}")
    assert expected.acceptance_length > 1.1  # Medusa has 1.2 here, the others more than 1.3
    assert counted.acceptance_length == pytest.approx(expected.acceptance_length, rel=0.02)
    assert counted.acceptance_per_position == pytest.approx(expected.acceptance_per_position, abs=0.02)


def test_vllm_drafts_the_tokens_that_our_own_forward_pass_drafts(
    trained, sharing_engine, draft_notes
) -> None:
    served = sharing_engine(trained.target)
    served.load_draft(trained.folder)
    prompt = trained.prompts[0]
    served.generate([prompt], DRAFTED)  # vLLM has started
    already = len(draft_notes.read_text().splitlines())
    (answer,) = served.generate([prompt], DRAFTED)
    noted = [json.loads(line) for line in draft_notes.read_text().splitlines()[already:]]
    guesses = [tuple(drafts) for step in noted for drafts in step.values()]
    steps = _Steps(trained.target, trained.folder, prompt, answer.token_ids).replay(guesses)
    assert len(steps) >= 10
    assert [step.theirs for step in steps] == [step.ours for step in steps]


@dataclass(frozen=True)
class _Step:
    theirs: tuple[int, ...]
    ours: tuple[int, ...]


class _Steps:
    """Replays one answer: what our proposer guesses wherever vLLM's drafter was asked."""

    def __init__(self, target: Path, draft: Path, prompt: list[int], answer: tuple[int, ...]) -> None:
        self._tokens, self._known = [*prompt, *answer], len(prompt) + 1
        model = HfModel(read_target(target), torch.device("cpu"), "float32")
        drafting = DraftSource.of_export(draft, model)
        self._proposer = drafting.new_proposer()
        self._hidden_TNH = Transformer(target).hidden(self._tokens)[:, list(drafting.layers)]
        self._proposed_for = 0

    def replay(self, guesses: list[tuple[int, ...]]) -> list[_Step]:
        steps = []
        for theirs in guesses:
            if self._known + len(theirs) >= len(self._tokens):
                break  # how many of the last ones were accepted, the answer's end does not tell
            steps.append(_Step(theirs, self._propose(len(theirs))))
            following = self._tokens[self._known : self._known + len(theirs)]
            wrong = (i for i, (a, b) in enumerate(zip(theirs, following, strict=True)) if a != b)
            self._known += next(wrong, len(theirs)) + 1
        return steps

    def _propose(self, count: int) -> tuple[int, ...]:
        start, stop = self._proposed_for, self._known - 1
        self._proposer.extend(self._tokens[start + 1 : stop + 1], self._hidden_TNH[start:stop])
        self._proposed_for = stop
        return self._proposer.propose(count, 0.0, torch.Generator()).token_ids
