"""RegenerationRequest has the options of ``spec-trainer regenerate``. This module imports little."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from spec_core.errors import ConfigError
from spec_trainer.base.option_values import check_least


@dataclass(frozen=True, kw_only=True)
class RegenerationRequest:
    """The options of ``spec-trainer regenerate``."""

    target: str
    """Folder or hub id of the target."""
    data: str
    """Prompts: a data file, folder or hub id, in any form that training takes."""
    output: Path
    """JSONL file to write; training takes it as data."""
    engine: str = "hf"
    """Engine that runs the target."""
    backend: str = "cpu"
    """Hardware; a backend plugin."""
    max_new_tokens: int = 1024
    """Largest number of tokens of one answer."""
    temperature: float = 1.0
    """1 samples from the target's own distribution, 0 is greedy."""
    top_p: float = 1.0
    """Sample from the most likely tokens that together have this probability."""
    seed: int | None = None
    """Seed of sampling. By default the engine draws its own random numbers, which vLLM does faster."""
    drop_cut: bool = False
    """Leave out rows with an answer that was cut at max-new-tokens."""
    on_bad_row: Literal["error", "skip"] = "error"
    """Treatment of a row that cannot be answered: it stops the command before it starts, or is left out."""
    part: str = "0/1"
    """Answer part I of N, as I/N with I from 0: every N-th row. So N commands use N devices."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a value out of its range, or an output that training cannot read."""
        for name, least in (("max_new_tokens", 1), ("temperature", 0), ("seed", 0)):
            check_least(name, getattr(self, name), least)
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"--top-p={self.top_p}: expected more than 0, at most 1")
        if self.output.suffix != ".jsonl":
            raise ConfigError(f"--output={self.output}: expected a .jsonl file, as training takes them")
        if not re.fullmatch(r"\d{1,6}/\d{1,6}", self.part) or self._index >= self._count:
            raise ConfigError(f"--part={self.part}: expected I/N with I from 0 to N - 1, such as 0/4")

    def has(self, number: int) -> bool:
        """Return whether row ``number`` of the data belongs to the part."""
        return number % self._count == self._index

    @property
    def _index(self) -> int:
        return int(self.part.partition("/")[0])

    @property
    def _count(self) -> int:
        return int(self.part.partition("/")[2])
