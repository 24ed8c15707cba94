"""Workload: the prompts of an evaluation and how they are to be decoded."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spec_core.records import SamplingParams

Prompts = list[list[int]]


@dataclass(frozen=True, kw_only=True)
class Workload:
    prompts: Prompts
    sampling: SamplingParams
    """What the document's own figures are of."""
    other_temperature: float | None = None
    """Measured besides, where ``sampling`` is greedy."""
    concurrency: tuple[int, ...] = ()

    @property
    def timed(self) -> SamplingParams:
        """``sampling``, without anything that costs time beside decoding."""
        return replace(self.sampling, with_margins=False)

    @property
    def greedy(self) -> SamplingParams:
        return replace(self.timed, temperature=0.0)

    @property
    def sampled(self) -> SamplingParams | None:
        temperature = self.sampling.temperature or self.other_temperature
        return replace(self.timed, temperature=temperature) if temperature else None

    @property
    def num_draft_tokens(self) -> int:
        return self.sampling.num_draft_tokens

    def without_draft(self) -> Workload:
        return replace(self, sampling=replace(self.sampling, num_draft_tokens=0))

    def groups(self, size: int) -> list[Prompts]:
        """The prompts, ``size`` at a time; the last group is filled up from the start, so that all are as large."""
        count = math.ceil(len(self.prompts) / size)
        cyclic = [self.prompts[index % len(self.prompts)] for index in range(count * size)]
        return [cyclic[start : start + size] for start in range(0, len(cyclic), size)]
