"""Decode a workload with a draft and without one, and measure the time.

Some engines have to restart to decode with another draft or without one. So the whole workload is decoded without a
draft first, then with the draft, then with the untrained draft.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from spec_trainer.base.waiting import Waiting
from spec_trainer.measure.evaluation.sweep import Sweep
from spec_trainer.workers.passes import Pass, answer_prompts, cut_at_end_token, decode

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from spec_core import Engine
    from spec_core.records import SamplingParams
    from spec_trainer.measure.evaluation.benchmarks import Questions
    from spec_trainer.measure.evaluation.workload import Workload

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Passes:
    """The passes over a workload that an engine has decoded, either all with a draft or all without one."""

    greedy: Pass
    sampled: Pass | None
    loads: Mapping[int, Pass]
    """Number of concurrent answers -> its timed pass, with the arrival times of tokens if the engine streams."""

    @property
    def seconds(self) -> float:
        """The duration of all passes."""
        return sum(
            one.seconds for one in (self.greedy, self.sampled, *self.loads.values()) if one is not None
        )

    def own(self, work: Workload) -> Pass:
        """Return the pass whose figures are at the document's top level: greedy or sampled, as ``work`` asks."""
        return self.sampled if self.sampled is not None and work.sampling.temperature > 0 else self.greedy


def ask_all(engine: Engine, work: Workload, asked: Questions) -> Workload:
    """Return the workload ``work`` with the later turns' prompts, which have the target's greedy answers.

    Decoding with the draft and without it then has the same prompts, so that texts and times can be compared.
    """
    ends = frozenset(engine.target.eos_token_ids)
    sampling = work.without_draft().greedy
    if asked.num_open:
        what = f"answering prompts ({asked.num_open}), for the questions that follow"
        log.info("%s", what)
        with Waiting(what):
            for request, answer in engine.generate_unordered(asked.next_request, sampling):
                ids = cut_at_end_token(answer, engine, sampling).token_ids
                asked.take(request, ids[:-1] if ids and ids[-1] in ends else ids)
    return replace(work, prompts=asked.prompts, benchmarks=asked.benchmarks, right=asked.right)


def decode_without_draft(engine: Engine, work: Workload) -> Passes:
    """Decode the workload without a draft.

    If the engine supports it, its answers also have the gap between the two largest logits at each token.
    """
    work = work.without_draft()
    passes = _decode_all(engine, work, "without a draft")
    if passes.greedy.answers[0].top2_margin:
        return passes
    what = (
        f"decoding prompts ({len(work.prompts)}) greedily once more, for the gaps of the two largest logits"
    )
    log.info("%s", what)
    with Waiting(what):
        answers = answer_prompts(engine, work.prompts, replace(work.greedy, with_margins=True))
    return replace(passes, greedy=replace(passes.greedy, answers=answers))


def decode_with_draft(
    engine: Engine, draft_model: Path, work: Workload, loads: Mapping[int, Pass] | None = None
) -> Passes:
    """Load the draft and decode the workload with it.

    ``loads``: concurrency -> its pass, if these were already decoded.
    """
    engine.load_draft(draft_model)
    return _decode_all(engine, work, _with_draft(work), loads)


def decode_sweep(engine: Engine, draft_model: Path, work: Workload, plain: Passes) -> Sweep | None:
    """Decode with each number of ``work.swept`` at each concurrency; None if there is one number only.

    ``plain``: the passes without a draft. An engine that starts anew for another number starts once for each.
    """
    if not work.swept:
        return None
    engine.load_draft(draft_model)
    each = (work.with_draft_tokens(number) for number in work.swept)
    drafted = {one.num_draft_tokens: _decode_loads(engine, one, _with_draft(one)) for one in each}
    return Sweep(plain=plain.loads, drafted=drafted)


def _with_draft(work: Workload) -> str:
    return f"with a draft (tokens of a round: {work.num_draft_tokens})"


def decode_once_with(engine: Engine, draft_model: Path, work: Workload, what: str) -> Pass:
    """Decode the workload once with the draft in the folder ``draft_model``.

    ``what``: the draft's name in the log.
    """
    engine.load_draft(draft_model)
    name = f"decoding prompts ({len(work.prompts)}) with {what}"
    return logged(name, lambda: decode(engine, work.prompts, work.timed, name))


def _decode_all(engine: Engine, work: Workload, how: str, loads: Mapping[int, Pass] | None = None) -> Passes:
    what = f"decoding prompts ({len(work.prompts)})"
    greedy = _decode_once(engine, work, work.greedy, f"{what} greedily {how}")
    sampled = None
    if (sampling := work.sampled) is not None:
        at = f"{what} at temperature {sampling.temperature:g} {how}"
        sampled = _decode_once(engine, work, sampling, at)
    if loads is None:
        loads = _decode_loads(engine, work, how)
    return Passes(greedy=greedy, sampled=sampled, loads=loads)


def logged(what: str, decode_one: Callable[[], Pass]) -> Pass:
    """Decode one pass, and log its figures as soon as it is done, so that a command that is killed has shown them."""
    log.info("%s", what)
    done = decode_one()
    tau = f", tau {done.counters.acceptance_length:.3f}" if done.counters.rounds else ""
    log.info("done %s: %s tokens, %.1f tokens/s%s", what, f"{done.num_tokens:,}", done.tokens_per_s, tau)
    return done


def _decode_loads(engine: Engine, work: Workload, how: str) -> dict[int, Pass]:
    return {size: _decode_load(engine, work, size, how) for size in work.concurrency}


def _decode_load(engine: Engine, work: Workload, size: int, how: str) -> Pass:
    what = f"timing answers at concurrency {size} {how}"
    streamed = replace(work.timed, with_times=True, concurrency=size)
    return logged(what, lambda: decode(engine, work.enough_for(size), streamed, what))


def _decode_once(engine: Engine, work: Workload, sampling: SamplingParams, what: str) -> Pass:
    if not work.benchmarks:
        return logged(what, lambda: decode(engine, work.prompts, sampling, what))
    passes = {
        name: partial(decode, engine, prompts, sampling, f"{what}, {name}")
        for name, prompts in work.by_benchmark().items()
    }
    return logged(what, lambda: Pass.joined({name: decode_one() for name, decode_one in passes.items()}))
