"""EvaluationRequest: what ``spec-trainer evaluate`` is asked for. Light: the command line imports it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 (cyclopts evaluates annotations)

from spec_core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    target: str
    """Folder or hub id of the target."""
    draft_model: Path
    """Exported draft folder."""
    prompts: Path
    """Data file; of each row, what comes before the last answer is the prompt."""
    engine: str = "hf"
    """What runs the target."""
    backend: str = "cpu"
    """Hardware."""
    num_draft_tokens: int = 4
    """Tokens that the draft proposes per round."""
    max_new_tokens: int = 128
    """Length of each answer."""
    temperature: float = 0.0
    """0 is greedy."""
    seed: int = 0
    """Seed of sampling."""

    def __post_init__(self) -> None:
        for name, least in (("num_draft_tokens", 1), ("max_new_tokens", 1), ("temperature", 0)):
            value = getattr(self, name)
            if not least <= value < float("inf"):
                raise ConfigError(f"--{name.replace('_', '-')}={value}: expected {least} or more")
