"""Workload has the prompts of an evaluation and the ways to decode them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from decimal import Decimal

    from spec_core.records import SamplingParams

Prompts = list[Sequence[int]]

_SHORT = 256
"""Tokens of the longest prompt of the first range of lengths."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Prompts, and the ways in which they are decoded."""

    prompts: Prompts
    benchmarks: tuple[str, ...] = ()
    """The benchmark of each prompt; empty if the prompts belong to no benchmark."""
    right: tuple[Decimal | str | None, ...] = ()
    """The right answer to each prompt of a benchmark, a number or a letter; None if there is none."""
    sampling: SamplingParams
    """Parameters of the decoding whose figures are at the document's top level."""
    other_temperature: float | None = None
    """Temperature that is measured as well if ``sampling`` is greedy."""
    concurrency: tuple[int, ...] = ()
    swept: tuple[int, ...] = ()
    """Numbers of draft tokens that are compared at each ``concurrency``; empty if there is only one."""

    @property
    def timed(self) -> SamplingParams:
        """The parameters ``sampling`` without options that take extra time, such as logit gaps."""
        return replace(self.sampling, with_margins=False)

    @property
    def greedy(self) -> SamplingParams:
        """The parameters ``timed`` with temperature 0."""
        return replace(self.timed, temperature=0.0)

    @property
    def sampled(self) -> SamplingParams | None:
        """The parameters ``timed`` with the temperature of sampled answers; None if these are not measured."""
        temperature = self.sampling.temperature or self.other_temperature
        return replace(self.timed, temperature=temperature) if temperature else None

    @property
    def num_draft_tokens(self) -> int:
        """Tokens that the draft proposes per round."""
        return self.sampling.num_draft_tokens

    def with_draft_tokens(self, number: int) -> Workload:
        """Return a copy of the workload with ``number`` draft tokens per round; 0: decoding without a draft."""
        return replace(self, sampling=replace(self.sampling, num_draft_tokens=number))

    def without_draft(self) -> Workload:
        """Return a copy of the workload whose options let the engine decode without a draft."""
        return self.with_draft_tokens(0)

    def by_length(self) -> Workload:
        """Return a copy with the prompts from short to long; its benchmarks are ranges of length.

        The end of each range is twice that of the one before.
        """
        order = sorted(range(len(self.prompts)), key=lambda place: len(self.prompts[place]))
        prompts = [self.prompts[place] for place in order]
        bounds = (max(_SHORT, 1 << (len(prompt) - 1).bit_length()) for prompt in prompts)
        return replace(
            self,
            prompts=prompts,
            benchmarks=tuple(f"up to {bound}" for bound in bounds),
            right=tuple(self.right[place] for place in order) if self.right else (),
        )

    def by_benchmark(self) -> dict[str, Prompts]:
        """Return benchmark -> its prompts, in their order in ``prompts``."""
        found: dict[str, Prompts] = {}
        for name, prompt in zip(self.benchmarks, self.prompts, strict=bool(self.benchmarks)):
            found.setdefault(name, []).append(prompt)
        return found

    def enough_for(self, concurrency: int) -> Prompts:
        """Return enough prompts to keep ``concurrency`` answers in progress; prompts are repeated if needed."""
        return list(itertools.islice(itertools.cycle(self.prompts), max(concurrency, len(self.prompts))))
