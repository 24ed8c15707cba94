"""Read and check all inputs of an evaluation, before an engine starts."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from spec_core.errors import ConfigError
from spec_core.records import SamplingParams
from spec_core.wording import counted
from spec_trainer.configuration.engine_options import read_engine_options
from spec_trainer.measure.evaluation.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spec_core import Draft, TargetSpec
    from spec_trainer.configuration.chat import PromptConfig
    from spec_trainer.configuration.engine_options import EngineOptions
    from spec_trainer.measure.evaluation.benchmarks import Questions
    from spec_trainer.measure.evaluation.request import EvaluationRequest
    from spec_trainer.measure.evaluation.workload import Prompts

log = logging.getLogger(__name__)

_AT_ONCE = 256
"""Largest number of answers at once, with a draft and without one. An engine may decode more at once without a draft,
and then speeds could not be compared."""
_OTHER_TEMPERATURE = 1.0
"""Temperature of the sampled answers if the request has none."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """An evaluation request with its target, draft, prompts and options, loaded and checked."""

    request: EvaluationRequest
    options: EngineOptions
    target: TargetSpec
    draft: Draft
    chat: PromptConfig
    """Settings by which conversations become prompts."""
    work: Workload
    """The prompts as far as they are known before the target has answered."""
    asked: Questions | None
    """The benchmarks that are asked, if there are any."""


def prepare(request: EvaluationRequest, words: Sequence[str]) -> Evaluation:
    """Load and check all inputs of the request; start no engine.

    Raise UsageError, with a message of one line, if an input is wrong.
    """
    from spec_kit.drafting.draft_files import check_finite
    from spec_kit.targets.target_reader import read_target
    from spec_trainer.base.hub import resolve_target
    from spec_trainer.configuration.chat import read_chat_record
    from spec_trainer.run.draft_folder import check_draft, position_warning

    options = read_engine_options(request.engine, request.backend, words)
    target = read_target(resolve_target(request.target))
    counts = request.draft_token_counts
    draft, num_draft_tokens = check_draft(request.draft_folder, target, max(counts, default=None))
    check_finite(request.draft_folder)
    if warning := position_warning(draft, target):
        log.warning("%s", warning)
    for count in counts or (num_draft_tokens,):
        options.engine_type.check_draft(options.config.engine, target, draft, request.draft_folder, count)
    trained = read_chat_record(request.draft_folder)
    chat = options.config.data.completed_by(trained, f"draft {request.draft_folder}")
    work = work_on_prompts(request, options, target, chat, num_draft_tokens)
    asked = None
    if request.bench:
        asked = _questions(request, target, _longest_prompt(request, target, num_draft_tokens), chat)
        work = replace(work, prompts=asked.prompts, benchmarks=asked.benchmarks, right=asked.right)
    return Evaluation(
        request=request, options=options, target=target, draft=draft, chat=chat, work=work, asked=asked
    )


def work_on_prompts(
    request: EvaluationRequest,
    options: EngineOptions,
    target: TargetSpec,
    chat: PromptConfig,
    num_draft_tokens: int,
) -> Workload:
    """Return the request's prompts, none if it has benchmarks, and the ways to decode them."""
    counts = request.draft_token_counts
    return Workload(
        prompts=[] if request.bench else _prompts(request, options, target, chat, num_draft_tokens),
        sampling=SamplingParams(
            max_new_tokens=request.max_new_tokens,
            temperature=request.temperature or 0.0,
            seed=request.seed,
            num_draft_tokens=num_draft_tokens,
            stop_at_eos=request.stop_at_eos,
            concurrency=_AT_ONCE,
        ),
        other_temperature=_OTHER_TEMPERATURE if request.temperature is None else None,
        concurrency=request.concurrencies,
        swept=counts if len(counts) > 1 else (),
    )


def _longest_prompt(request: EvaluationRequest, target: TargetSpec, num_draft_tokens: int) -> int:
    room = target.max_positions - request.max_new_tokens - num_draft_tokens - 1
    if room < 1:
        raise ConfigError(
            f"--max-new-tokens={request.max_new_tokens} and {counted(num_draft_tokens, 'draft token')} leave no room "
            f"for a prompt in the {target.max_positions} positions of target {target.folder}; lower --max-new-tokens"
        )
    return room


def _prompts(
    request: EvaluationRequest,
    options: EngineOptions,
    target: TargetSpec,
    chat: PromptConfig,
    num_draft_tokens: int,
) -> Prompts:
    from spec_trainer.data.prompts import load_prompts
    from spec_trainer.plan.images import prompt_image_rules

    assert request.prompts is not None, "a request has prompts or benchmarks"
    images = prompt_image_rules(options.engine_type, target)
    longest = _longest_prompt(request, target, num_draft_tokens)
    return load_prompts(request.prompts, target.folder, target.vocab_size, longest, chat, images)


def _questions(request: EvaluationRequest, target: TargetSpec, longest: int, chat: PromptConfig) -> Questions:
    from spec_trainer.data.tokens import Encoder
    from spec_trainer.measure.evaluation.benchmarks import Questions, parse_benchmarks, read_benchmarks

    rows = read_benchmarks(parse_benchmarks(request.bench), request.bench_data)
    return Questions(rows, Encoder(target.folder, target.vocab_size, chat), longest)
