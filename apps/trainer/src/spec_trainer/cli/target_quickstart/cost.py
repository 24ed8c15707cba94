"""Measure before the training what a token and a round with a draft cost here (``evaluate --breakdown``)."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from spec_core import Draft, Engine
from spec_core.records import SamplingParams
from spec_trainer.base.time_limit import TimeLimit
from spec_trainer.base.waiting import Waiting
from spec_trainer.cli.commands.evaluate import export_untrained
from spec_trainer.cli.engine_output import engine_output_kept
from spec_trainer.cli.target_quickstart.recipe import draft_options
from spec_trainer.cli.target_quickstart.work import Work
from spec_trainer.data.prompts import load_prompts
from spec_trainer.measure.evaluation.breakdown import break_down, rounds_that_can_pay, verdict
from spec_trainer.measure.evaluation.workload import Prompts, Workload
from spec_trainer.training.wiring import create_engine

log = logging.getLogger(__name__)

_PROMPTS = 2
_FEWEST_TOKENS, _MOST_TOKENS = 8, 64
"""Limits on the tokens of each answer: fewer measure mostly chance."""
_PASSES = 12
"""Time of a whole breakdown, in units of decoding once without a draft. It decodes once without a draft, and for
each of about three numbers of guesses with the draft and with guesses that take no time."""
_TRIAL_TOKENS = 8
_SAFETY = 0.7


def measure_cost(work: Work, budget_s: float, limit: TimeLimit) -> dict[str, Any]:
    """Return ``break_down``'s figures for one answer at a time, and its ``verdict``."""
    options = draft_options(work.draft_type, work.target, work.machine, budget_s)
    draft = work.draft_type(work.draft_type.Config(name=work.request.draft, **options))
    target = work.target
    prompts = load_prompts(work.folder.held_out, target.folder, target.vocab_size, target.max_positions)
    prompts = prompts[:_PROMPTS]
    with TemporaryDirectory() as scratch:
        export_untrained(draft, work.target, Path(scratch) / "untrained")
        with engine_output_kept(work.options.engine_type), create_engine(work.options, work.target) as engine:
            workload = Workload(prompts=prompts, sampling=_sampling(engine, prompts, draft, limit))
            (measured,) = break_down(engine, Path(scratch) / "untrained", workload)
    return {**measured, "verdict": verdict(measured["rounds"])}


def cost_of(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return the cost that the document of ``evaluate`` shows, for the one number of guesses that it measured."""
    (alone,) = figures["throughput"]
    tau = figures["greedy"]["acceptance_length"]
    token_ms = 1000 / alone["tokens_per_s_without_draft"]
    break_even = tau / alone["speedup"]
    row = {
        "num_draft_tokens": figures["num_draft_tokens"],
        "round_ms": break_even * token_ms,
        "target_ms": None,
        "guesses_ms": None,
        "break_even": break_even,
        "acceptance_length": tau,
    }
    return {"concurrency": 1, "token_ms": token_ms, "rounds": [row], "verdict": verdict([row])}


def can_pay(cost: Mapping[str, Any]) -> bool:
    """Return whether some number of guesses is worth its round if the target accepts all of them."""
    return bool(rounds_that_can_pay(cost["rounds"]))


def token_s(engine: Engine, prompt: Prompts) -> float:
    """Return the seconds of a token of a second answer to the prompt; the first one warms the engine up."""
    trial = SamplingParams(max_new_tokens=_TRIAL_TOKENS, stop_at_eos=False)
    with Waiting("timing the target"):
        engine.generate(prompt, trial)
        start = time.perf_counter()
        engine.generate(prompt, trial)
        return (time.perf_counter() - start) / _TRIAL_TOKENS


def _sampling(engine: Engine, prompts: Prompts, draft: Draft, limit: TimeLimit) -> SamplingParams:
    """Return options of decoding with which the whole breakdown takes the time that is left."""
    one_s = token_s(engine, prompts[:1])
    fitting = int(_SAFETY * max(0.0, limit.left_s) / (len(prompts) * one_s * _PASSES))
    return SamplingParams(
        max_new_tokens=min(max(fitting, _FEWEST_TOKENS), _MOST_TOKENS),
        num_draft_tokens=draft.default_draft_tokens,
        stop_at_eos=False,
    )
