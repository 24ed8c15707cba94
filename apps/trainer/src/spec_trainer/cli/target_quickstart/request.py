"""TargetQuickstart has the options of ``spec-trainer quickstart --target``. This module imports little."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from spec_core.errors import ConfigError
from spec_core.wording import shown

LEAST_S = 20.0
"""Smallest budget: engines start several times."""
_MOST_S = 30 * 86400.0
_SECONDS = {"s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True, kw_only=True)
class TargetQuickstart:
    """The options of ``spec-trainer quickstart --target``."""

    target: str
    """Folder or hub id of the target."""
    data: str | None = None
    """Prompts, in any form that training takes; None: the target writes them."""
    budget_s: float = 600.0
    """Seconds that all calls with this output may take together."""
    draft: str
    """Drafting algorithm; a draft plugin."""
    engine: str | None = None
    """Engine that runs the target; an engine plugin. None: see ``engine.choose_engine``."""
    backend: str | None = None
    """Hardware; a backend plugin. None: the first one that has devices of its own here, or else the default."""
    output: Path | None = None
    """Folder of all files; None: runs/quickstart- and the name of the target."""
    seed: int = 0

    @property
    def folder(self) -> Path:
        """The folder of all files."""
        return self.output or Path("runs") / f"quickstart-{Path(self.target).resolve().name}"


def parse_budget(text: str) -> float:
    """Return the seconds of a budget such as ``90s``, ``10m`` or ``1.5h``. Raise ConfigError if it is none."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?)([smh])", text.strip())
    seconds = float(found[1]) * _SECONDS[found[2]] if found else 0.0
    if not LEAST_S <= seconds <= _MOST_S:
        raise ConfigError(
            f"--budget={shown(text)}: expected a time of {LEAST_S:.0f}s to {_MOST_S / 86400:.0f} days, such as 90s, "
            "10m or 1.5h"
        )
    return seconds
