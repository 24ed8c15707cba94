"""Measure what a round with a draft costs, and so which acceptance length a draft needs to pay.

A round is one pass of the target over the last token and all guesses, and the draft's work for these guesses. It pays
if it yields more tokens than the target computes alone in the same time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from spec_core import Proposal, Proposer
from spec_core.wording import counted
from spec_trainer.measure.evaluation.measure import logged
from spec_trainer.measure.evaluation.tables import setting_lines
from spec_trainer.workers.passes import decode

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import torch
    from torch import Tensor

    from spec_core import Engine
    from spec_trainer.measure.evaluation.workload import Workload
    from spec_trainer.workers.passes import Pass


class FreeGuesses(Proposer):
    """A proposer whose guesses take no time; a round with it is a pass of the target alone."""

    def extend(self, next_ids: Sequence[int], hidden_TNH: Tensor) -> None:
        """Ignore the states."""

    def propose(self, num_tokens: int, temperature: float, generator: torch.Generator) -> Proposal:
        """Guess token 0 each time."""
        return Proposal(token_ids=(0,) * num_tokens)


def break_down(engine: Engine, draft_model: Path, work: Workload) -> list[dict[str, Any]]:
    """Return for each number of concurrent answers what a token costs without a draft, and each round with one.

    Answers are greedy, and as long as they may be. Milliseconds are those of one step of all concurrent answers. A
    round has ``num_draft_tokens`` guesses. ``break_even`` is the acceptance length at which it takes as long as that
    many tokens without a draft. ``target_ms`` and ``guesses_ms`` divide it if the engine takes proposers (E14).
    """
    sizes = work.concurrency or (1,)
    plain = {size: _decode(engine, work, size, 0, "without a draft") for size in sizes}
    counts = _numbers_of_guesses(work.num_draft_tokens)
    alone: dict[tuple[int, int], Pass] = {}
    if engine.abilities.proposers:
        engine.use_proposer(FreeGuesses)
        alone = _decode_each(engine, work, sizes, counts, "with guesses that take no time")
    engine.load_draft(draft_model)
    drafted = _decode_each(engine, work, sizes, counts, "with the draft")
    return [
        {
            "concurrency": size,
            "token_ms": _step_ms(plain[size], size, plain[size].num_tokens),
            "rounds": [_round(size, count, plain[size], drafted, alone) for count in counts],
        }
        for size in sizes
    ]


def breakdown_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the printed lines: a table for each number of concurrent answers, and whether a draft can pay."""
    heads = ("guesses", "ms a round", "target", "guesses", "pays above tau", "of at most", "tau here")
    yield from setting_lines(document)
    for part in document["breakdown"]:
        yield ""
        yield f"answers at once: {part['concurrency']}, {part['token_ms']:.2f} ms a token without a draft"
        yield "".join(f"{head:>16}" for head in heads)
        for row in part["rounds"]:
            cells = (
                f"{row['num_draft_tokens']}",
                f"{row['round_ms']:.2f}",
                "" if row["target_ms"] is None else f"{row['target_ms']:.2f}",
                "" if row["guesses_ms"] is None else f"{row['guesses_ms']:.2f}",
                f"{row['break_even']:.2f}",
                f"{row['num_draft_tokens'] + 1}",
                f"{row['acceptance_length']:.2f}",
            )
            yield "".join(f"{cell:>16}" for cell in cells)
        yield verdict(part["rounds"])


def verdict(rounds: Sequence[Mapping[str, Any]]) -> str:
    """Return whether a draft can pay, and from which acceptance length, by the ``rounds`` of ``break_down``."""
    able = rounds_that_can_pay(rounds)
    if not able:
        return "no draft of this kind can pay here: a round takes longer than all tokens that it could yield"
    easiest = min(able, key=lambda row: row["break_even"])
    count = counted(easiest["num_draft_tokens"], "draft token")
    tau = max(1.0, easiest["break_even"])  # only chance makes a round faster than a token
    return f"with {count} a round, a draft pays here if its tau is above {tau:.2f}"


def rounds_that_can_pay(rounds: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the ``rounds`` of ``break_down`` that pay if the target accepts all guesses."""
    return [row for row in rounds if row["break_even"] < row["num_draft_tokens"] + 1]


def _numbers_of_guesses(most: int) -> list[int]:
    """Return the powers of two below ``most``, and ``most``."""
    return [*(1 << power for power in range(most.bit_length()) if 1 << power < most), most]


def _decode_each(
    engine: Engine, work: Workload, sizes: Sequence[int], counts: Sequence[int], how: str
) -> dict[tuple[int, int], Pass]:
    return {(size, count): _decode(engine, work, size, count, how) for count in counts for size in sizes}


def _decode(engine: Engine, work: Workload, size: int, num_draft_tokens: int, how: str) -> Pass:
    what = f"decoding prompts ({size} at once, draft tokens: {num_draft_tokens}) {how}"
    sampling = replace(work.greedy, num_draft_tokens=num_draft_tokens, concurrency=size, stop_at_eos=False)
    return logged(what, lambda: decode(engine, work.enough_for(size), sampling, what))


def _round(
    size: int,
    count: int,
    plain: Pass,
    drafted: Mapping[tuple[int, int], Pass],
    alone: Mapping[tuple[int, int], Pass],
) -> dict[str, Any]:
    own = drafted[size, count]
    bare = alone.get((size, count))
    round_ms = _step_ms(own, size, own.counters.rounds)
    target_ms = None if bare is None else _step_ms(bare, size, bare.counters.rounds)
    return {
        "num_draft_tokens": count,
        "round_ms": round_ms,
        "target_ms": target_ms,
        "guesses_ms": None if target_ms is None else max(0.0, round_ms - target_ms),
        "break_even": round_ms / _step_ms(plain, size, plain.num_tokens),
        "acceptance_length": own.counters.acceptance_length,
    }


def _step_ms(done: Pass, size: int, steps: int) -> float:
    """Return the milliseconds of one step of ``size`` answers, of which a pass has ``steps`` in all."""
    return 1000 * done.seconds * size / max(1, steps)
