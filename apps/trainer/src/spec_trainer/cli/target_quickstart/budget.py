"""Divide the time of a round of the quickstart over its stages."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

PROMPTS, COST, ANSWERS, TRAINING, FIGURES, REPORT = (
    "prompts", "cost", "answers", "training", "figures", "report",
)  # fmt: skip
SHARES: Mapping[str, float] = {
    PROMPTS: 0.10,
    COST: 0.12,
    ANSWERS: 0.24,
    TRAINING: 0.36,
    FIGURES: 0.16,
    REPORT: 0.02,
}
"""Stage -> its share of the time, in the order of the stages. Time that a stage leaves goes to the later ones."""


STARTS_S: Mapping[str, float] = {PROMPTS: 100.0, COST: 100.0, TRAINING: 120.0, FIGURES: 120.0}
"""Stage -> seconds of it that the starts of an engine with processes of its own take on an accelerator, the first
time on a machine. With vLLM 0.26 on an H200 a start took 30 to 105 s, and the first one with a draft, which compiles
it, 95 to 120 s. Prompts, cost and answers have one start; the user's own prompts need none."""
_MOST_STARTS = 0.7
"""Largest share of the time that is set aside for starts."""


class StageTime(NamedTuple):
    """The time that a stage of a round may take."""

    starts_s: float
    """Seconds that are set aside for the engine's starts."""
    work_s: float
    """Seconds that are left for the work."""

    @property
    def whole_s(self) -> float:
        """Starts and work together."""
        return self.starts_s + self.work_s


def time_for(
    stage: str,
    budget_s: float,
    spent: Mapping[str, float],
    slow_starts: Collection[str] = (),
    most_figures_s: float = math.inf,
) -> StageTime:
    """Return the time that ``stage`` may take; ``spent`` has the seconds of each stage that has ended.

    ``slow_starts``: the stages whose engine takes long to start (``STARTS_S``). ``most_figures_s``: the most seconds
    of work that ``FIGURES`` can use; the other stages get what its share has beyond that.
    """
    left_s = max(0.0, budget_s - sum(spent.values()))
    shares = {name: share for name, share in SHARES.items() if name not in spent}
    slow = {name: STARTS_S[name] for name in slow_starts}
    scale = min(1.0, _MOST_STARTS * budget_s / sum(slow.values())) if slow else 0.0
    starts = {name: scale * seconds for name, seconds in slow.items() if name not in spent}
    worked_s = max(0.0, left_s - sum(starts.values()))
    figures_share = shares.pop(FIGURES, 0.0)
    figures_s = min(most_figures_s, worked_s * figures_share / (figures_share + sum(shares.values())))
    if stage == FIGURES:
        return StageTime(starts.get(stage, 0.0), figures_s)
    share = shares.get(stage, 0.0) / sum(shares.values())
    return StageTime(starts.get(stage, 0.0), share * (worked_s - figures_s))
