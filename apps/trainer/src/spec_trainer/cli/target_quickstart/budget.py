"""The time of a round of the quickstart, divided over its stages."""

from __future__ import annotations

from collections.abc import Mapping

PROMPTS, COST, ANSWERS, TRAINING, FIGURES, REPORT = (
    "prompts", "cost", "answers", "training", "figures", "report",
)  # fmt: skip
SHARES: Mapping[str, float] = {
    PROMPTS: 0.10,
    COST: 0.12,
    ANSWERS: 0.24,
    TRAINING: 0.34,
    FIGURES: 0.16,
    REPORT: 0.04,
}
"""Stage -> its share of the time, in the order of the stages. Time that a stage leaves goes to the later ones."""


STARTS_S: Mapping[str, float] = {PROMPTS: 40.0, ANSWERS: 40.0, TRAINING: 120.0, FIGURES: 180.0}
"""Stage -> seconds of it that the starts of an engine on an accelerator take, the first time on a machine. With vLLM
0.26 on an H200 a start took 30 to 60 s, and the first one with a draft, which compiles it, two minutes."""
_MOST_STARTS = 0.7
"""Largest share of the time that is set aside for starts."""


def time_for(stage: str, budget_s: float, spent: Mapping[str, float], starts_slowly: bool) -> float:
    """Return the seconds that ``stage`` may take; ``spent`` has the seconds of each stage that has ended.

    ``starts_slowly``: the engine's starts take long (``STARTS_S``), so ``COST``, which needs several, gets no time.
    """
    left_s = max(0.0, budget_s - sum(spent.values()))
    without = {*spent, COST} if starts_slowly else {*spent}
    shares = {name: share for name, share in SHARES.items() if name not in without}
    scale = min(1.0, _MOST_STARTS * budget_s / sum(STARTS_S.values())) if starts_slowly else 0.0
    starts = {name: scale * seconds for name, seconds in STARTS_S.items() if name not in spent}
    worked_s = max(0.0, left_s - sum(starts.values()))
    return starts.get(stage, 0.0) + worked_s * shares.get(stage, 0.0) / sum(shares.values())
