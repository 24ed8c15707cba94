"""Section ``data`` of the configuration."""

from __future__ import annotations

from typing import Annotated, Literal, Self

import pydantic

from spec_trainer.data.chat_config import PromptConfig


class DataConfig(PromptConfig):
    """Section ``data``: what is trained on, and how rows become samples."""

    path: str | None = None
    """A .jsonl, .json or .parquet file, a folder of them, or a hub id ``owner/name[:split]``; only a draft that
    follows live traffic can do without."""
    eval_path: str | None = None
    """Held-out data, in the forms that ``path`` takes; with it nothing is held out from ``path``."""
    eval_samples: int | None = pydantic.Field(None, ge=0)
    """Samples of ``path`` held out where there is no ``eval_path``: by default 64, never more than a tenth of all."""
    features: Annotated[str, pydantic.Field(min_length=1)] | None = None
    """Folder that ``spec-trainer capture`` wrote: its features are read, and no engine starts."""
    max_length: int = pydantic.Field(2048, ge=2)
    """Tokens that a sample keeps; what comes after them is cut off."""
    last_turn_only: bool = False
    """Supervise only the last assistant turn of a conversation; a row's own flag wins."""
    packing: bool = True
    """Documents of a micro-batch touch; without it each is padded to the longest."""
    on_bad_row: Literal["error", "skip"] = "error"
    """Treatment of a malformed row: it stops the command, or is dropped and counted in the report."""
    shuffle: bool = True
    """A new order in every epoch; without it, the order of the files."""

    @pydantic.model_validator(mode="after")
    def _one_source_of_held_out_data(self) -> Self:
        if self.eval_path is not None and self.eval_samples is not None:
            raise ValueError(
                "eval_path and eval_samples are two sources of held-out data; remove one of them"
            )
        return self
