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


def time_for(stage: str, budget_s: float, spent: Mapping[str, float]) -> float:
    """Return the seconds that ``stage`` may take; ``spent`` has the seconds of each stage that has ended."""
    left = sum(share for name, share in SHARES.items() if name not in spent)
    return max(0.0, budget_s - sum(spent.values())) * SHARES[stage] / left
