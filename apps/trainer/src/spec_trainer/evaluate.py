"""Acceptance length and speed of a draft, by an engine that really decodes with it."""

from __future__ import annotations

import logging
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_core import Backend, Engine, plugins
from spec_core.records import SamplingParams
from spec_trainer.draft_trainer import export_draft

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spec_core import Draft, TargetSpec
    from spec_core.records import Generation
    from spec_trainer.evaluation_request import EvaluationRequest

log = logging.getLogger(__name__)

Prompts = list[list[int]]

_TIE = 0.1
"""Gap of the two largest logits under which bf16 rounding may flip a greedy choice (maths.md, Decoding)."""
_ENOUGH_TOKENS = 5000
"""Generated tokens under which an acceptance length is noise (maths.md, Decoding)."""


_GREEDY_PROMPTS = 12
"""Prompts whose greedy texts are compared when the evaluation itself samples."""


def evaluate_draft(request: EvaluationRequest) -> dict[str, Any]:
    """The document of ``evaluate --json``."""
    from spec_core.target_reader import read_target
    from spec_trainer.data.prompts import load_prompts
    from spec_trainer.engines.draft_folder import recognise
    from spec_trainer.resolve import resolve_target

    backend_type = plugins.load_available(Backend, request.backend)
    engine_type = plugins.load_available(Engine, request.engine)
    target = read_target(resolve_target(request.target))
    draft = recognise(request.draft_model)
    draft.check_target(target)
    room = target.max_positions - request.max_new_tokens - request.num_draft_tokens - 1
    prompts = load_prompts(request.prompts, target.folder, target.vocab_size, max(room, 2))
    sampling = SamplingParams(
        max_new_tokens=request.max_new_tokens,
        temperature=request.temperature,
        seed=request.seed,
        num_draft_tokens=request.num_draft_tokens,
    )
    device = backend_type(backend_type.Config(name=request.backend)).device(0)
    with (
        tempfile.TemporaryDirectory() as scratch,
        engine_type(engine_type.Config(name=request.engine), target, device) as engine,
    ):
        engine.load_draft(export_untrained(draft, target, Path(scratch) / "untrained"))
        decode(engine, prompts, sampling)
        before = engine.acceptance().acceptance_length
        return {
            "target": str(target.folder),
            "draft": str(request.draft_model),
            "engine": request.engine,
            "acceptance_length_before": before,
            **measure(engine, request.draft_model, prompts, sampling),
        }


def measure(engine: Engine, draft_model: Path, prompts: Prompts, sampling: SamplingParams) -> dict[str, Any]:
    """Decodes the prompts with the draft and plainly; greedily both ways too, to compare the texts."""
    greedy = replace(sampling, temperature=0.0)
    plain = decode(engine, prompts, replace(sampling, num_draft_tokens=0))
    plain_greedy = (
        plain if sampling == greedy else decode(engine, prompts, replace(greedy, num_draft_tokens=0))
    )
    engine.load_draft(draft_model)
    drafted = decode(engine, prompts, sampling)
    counters = engine.acceptance()
    drafted_greedy = drafted if sampling == greedy else decode(engine, prompts, greedy)
    if drafted.num_tokens < _ENOUGH_TOKENS:
        log.warning("%d generated tokens are few, %d or more are advised", drafted.num_tokens, _ENOUGH_TOKENS)
    return {
        "temperature": sampling.temperature,
        "num_draft_tokens": sampling.num_draft_tokens,
        "acceptance_length": counters.acceptance_length,
        "acceptance_per_position": counters.acceptance_per_position,
        "drafted": counters.drafted,
        "accepted": counters.accepted,
        "rounds": counters.rounds,
        "generated_tokens": drafted.num_tokens,
        **_compare(plain_greedy.answers, drafted_greedy.answers),
        "tokens_per_s": drafted.tokens_per_s,
        "tokens_per_s_without_draft": plain.tokens_per_s,
    }


@dataclass(frozen=True)
class Decoded:
    """Answers of one pass over the prompts and how long it took."""

    answers: list[Generation]
    seconds: float

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


def decode(engine: Engine, prompts: Prompts, sampling: SamplingParams) -> Decoded:
    start = time.perf_counter()
    answers = engine.generate(prompts, sampling)
    return Decoded(answers, time.perf_counter() - start)


def export_untrained(draft: Draft, target: TargetSpec, folder: Path) -> Path:
    """A draft of the same shape with fresh weights: where training began."""
    import torch

    from spec_core.target_reader import read_target_tensors

    fresh = type(draft)(draft.config.model_copy(update={"init_from": None}))
    with torch.random.fork_rng(devices=[]):
        module = fresh.build(target, read_target_tensors(target), None)
    export_draft(fresh, module.state_dict(), target, folder)
    return folder


def _compare(plain: Sequence[Generation], drafted: Sequence[Generation]) -> dict[str, Any]:
    """Whether speculation changed the greedy text; a difference at a near tie is rounding, and its share is told."""
    firsts = [_first_difference(a, b) for a, b in zip(plain, drafted, strict=True)]
    differences = [gap for gap in firsts if gap is not None]
    return {
        "outputs_equal": not differences,
        "outputs_differing_share": len(differences) / len(firsts),
        "outputs_differing_only_at_ties": all(gap < _TIE for gap in differences),
    }


def _first_difference(plain: Generation, drafted: Generation) -> float | None:
    """Top-two gap of plain decoding where the texts part; infinite where one just ends; None if they are equal."""
    for index, (one, other) in enumerate(zip(plain.token_ids, drafted.token_ids, strict=False)):
        if one != other:
            return plain.top_two_gap[index] if plain.top_two_gap else float("inf")
    return None if len(plain.token_ids) == len(drafted.token_ids) else float("inf")
