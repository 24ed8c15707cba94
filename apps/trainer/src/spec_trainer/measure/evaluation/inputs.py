"""Compute the figures of an evaluation separately for prompts of text alone and with images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spec_core.records import AcceptanceCounters, images_of
from spec_trainer.measure.evaluation.measure import Passes
from spec_trainer.measure.evaluation.workload import Workload
from spec_trainer.workers.passes import Pass

TEXT, IMAGES = "text", "images"


def figures_by_input(
    work: Workload, plain: Passes, drafted: Passes, untrained: Pass | None
) -> dict[str, dict[str, Any]]:
    """Return the figures of prompts of text alone and of prompts with images; empty if none has images.

    The figures belong to the kind of decoding (greedy or sampled) that is at the document's top level. ``untrained``:
    the pass with an untrained draft, if there was one.
    """
    seen = [images_of(prompt) for prompt in work.prompts]
    if not any(seen):
        return {}
    places = {
        TEXT: [place for place, images in enumerate(seen) if not images],
        IMAGES: [place for place, images in enumerate(seen) if images],
    }
    own = drafted.own(work)
    return {
        name: {
            "prompts": len(chosen),
            "images": sum(len(seen[place]) for place in chosen),
            **_acceptance(_part(own, chosen)),
            "acceptance_length_before": _length(None if untrained is None else _part(untrained, chosen)),
            "outputs_equal": _part(plain.greedy, chosen).texts == _part(drafted.greedy, chosen).texts,
        }
        for name, chosen in places.items()
        if chosen
    }


def input_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield a table with a row for text and a row for images; nothing if no prompt has images."""
    rows = document["inputs"]
    if not rows:
        return
    heads = ("prompts", "images", "tokens", "tau", "tau/request", "untrained")
    yield (
        f"{'prompts of':<12}"
        + "".join(f"{head:>13}" for head in heads)
        + "  rounds that accept each position"
    )
    for name, row in rows.items():
        lengths = (
            row[key]
            for key in ("acceptance_length", "acceptance_length_per_request", "acceptance_length_before")
        )
        cells = (
            *(f"{row[key]:,}" for key in ("prompts", "images", "generated_tokens")),
            *("" if length is None else f"{length:.3f}" for length in lengths),
        )
        shares = " ".join(f"{share:.2f}" for share in row["acceptance_per_position"])
        yield f"{name:<12}" + "".join(f"{cell:>13}" for cell in cells) + f"  {shares}"


def _part(one: Pass, places: Sequence[int]) -> Pass:
    """Return the part of a pass that has the answers at the indices ``places``.

    Its counters are summed over these answers. They are 0 if the engine does not count per answer.
    """
    answers = [one.answers[place] for place in places]
    start = AcceptanceCounters(accepted_per_position=(0,) * len(one.counters.accepted_per_position))
    counters = sum((answer.acceptance for answer in answers), start)
    return Pass(answers=answers, seconds=one.seconds, counters=counters)


def _acceptance(part: Pass) -> dict[str, Any]:
    counters = part.counters
    return {
        "acceptance_length": _length(part),
        "acceptance_length_per_request": part.acceptance_length_per_request,
        "acceptance_per_position": counters.acceptance_per_position,
        "accepted": counters.accepted,
        "rounds": counters.rounds,
        "generated_tokens": part.num_tokens,
    }


def _length(part: Pass | None) -> float | None:
    return part.counters.acceptance_length if part is not None and part.counters.rounds else None
