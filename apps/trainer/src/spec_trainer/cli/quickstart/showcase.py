"""Collect data for the quickstart's report: texts with guesses, acceptance by topic, and speeds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from spec_core import Engine
from spec_core.records import AcceptanceCounters, Generation, SamplingParams
from spec_trainer.measure.evaluation.workload import Prompts
from spec_trainer.workers.passes import decode_warm

Decode = Callable[[Sequence[int]], str]

log = logging.getLogger(__name__)

NUM_TEXTS = 4
SIDE_BY_SIDE = (1, 4, 8)
"""Numbers of texts decoded at once to measure speeds; with many texts a draft does not help on a CPU."""
LEAST_TIMED = 4
"""Smallest number of texts for a speed, so that no single text dominates the result."""
TIMED_TOKENS = 32


def speeds(
    engine: Engine, prompts: Prompts, sampling: SamplingParams, most: int | None
) -> list[dict[str, Any]]:
    """Return tokens per second for each concurrency and number of draft tokens (0: plain decoding).

    The engine must be warmed up. ``most``: the most draft tokens of a pass; None if there is no limit.
    """
    rows = list[dict[str, Any]]()
    beyond = sampling.num_draft_tokens + 2
    counts = sorted({min(count, most or count) for count in (0, 1, 2, sampling.num_draft_tokens, beyond)})
    sampling = replace(
        sampling, max_new_tokens=min(sampling.max_new_tokens, TIMED_TOKENS), with_margins=False
    )
    plain = 0.0
    for size in (size for size in SIDE_BY_SIDE if size <= max(1, len(prompts))):
        for count in counts:
            way = replace(sampling, num_draft_tokens=count, concurrency=size)
            tokens_per_s = decode_warm(engine, prompts[: max(size, LEAST_TIMED)], way).tokens_per_s
            plain = tokens_per_s if count == 0 else plain
            rows.append(
                {
                    "concurrency": size,
                    "num_draft_tokens": count,
                    "tokens_per_s": tokens_per_s,
                    "speedup": tokens_per_s / plain,
                }
            )
    return rows


def texts_and_topics(prompts: Prompts, answers: Sequence[Generation], text_of: Decode) -> dict[str, Any]:
    """Return some answers with the outcome of each guess, and the acceptance length by prompt topic."""
    topics: dict[str, AcceptanceCounters] = {}
    for prompt, answer in zip(prompts, answers, strict=True):
        topic = topic_of(text_of(prompt))
        topics[topic] = topics.get(topic, AcceptanceCounters()) + answer.acceptance
    return {
        "texts": [
            {"prompt": text_of(prompt), "tokens": _tokens(answer, text_of)}
            for prompt, answer in list(zip(prompts, answers, strict=True))[:NUM_TEXTS]
        ],
        "topics": {
            topic: {"acceptance_length": counters.acceptance_length, "rounds": counters.rounds}
            for topic, counters in sorted(topics.items())
        },
    }


def topic_of(text: str) -> str:
    """Return the kind of text that a prompt begins with: classes, functions, or prose and other code."""
    first = text.removeprefix("<|im_start|>user\n").lstrip().split(maxsplit=1)[:1]
    kinds = {"class": "classes", "def": "functions", "async": "functions", "@": "functions"}
    word = first[0] if first else ""
    return kinds.get("@" if word.startswith("@") else word, "prose and other code")


def _tokens(answer: Generation, text_of: Decode) -> list[dict[str, Any]]:
    """Return the text of each token of an answer, and how the draft guessed it.

    With each token come the position of its accepted guess (0: none), and the text of a refused guess, if
    any.
    """
    guess_depths = answer.guess_depths or (0,) * len(answer.token_ids)
    refused = answer.refused_guesses or (-1,) * len(answer.token_ids)
    return [
        {
            "text": text_of([token_id]),
            "place": guess_depth if guess < 0 else 0,
            "refused": text_of([guess]) if guess >= 0 else None,
        }
        for token_id, guess_depth, guess in zip(answer.token_ids, guess_depths, refused, strict=True)
    ]
