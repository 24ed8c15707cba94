"""This module defines section ``data`` of the configuration."""

from __future__ import annotations

from typing import Annotated, Literal

import pydantic

from spec_trainer.configuration.chat import PromptConfig


class DataConfig(PromptConfig):
    """Section ``data``: the training data, and how rows become samples."""

    path: str | None = None
    """A .jsonl, .json or .parquet file, a folder of such files, or a hub id ``owner/name[:split]``. Only
    ``spec-trainer follow`` can run without it."""
    eval_path: str | None = None
    """Held-out data, in the forms that ``path`` takes; if it is set, nothing is held out from ``path``."""
    eval_samples: int | None = pydantic.Field(None, ge=0)
    """Number of samples of ``path`` that are held out if there is no ``eval_path``. By default 64, but at
    most a tenth of all samples."""
    features: Annotated[str, pydantic.Field(min_length=1)] | None = None
    """Folder that ``spec-trainer capture`` wrote: its features are read, and no engine starts."""
    features_dtype: Literal["target", "fp8_e4m3"] = "target"
    """How features are sent and stored. fp8_e4m3: in half the bytes of bfloat16, 8 bits a number and a scale for each
    token and layer; target: in the target's dtype."""
    max_length: int = pydantic.Field(2048, ge=2)
    """Largest number of tokens of a sample; further tokens are cut off."""
    last_turn_only: bool = False
    """Supervise only the last assistant turn of a conversation; a row's own ``last_turn_only`` takes
    precedence."""
    packing: bool = True
    """Pack the documents of a micro-batch without padding; otherwise pad each document to the longest."""
    on_bad_row: Literal["error", "skip"] = "error"
    """Treatment of a malformed row: it stops the command, or is dropped and counted in the report."""
    shuffle: bool = True
    """Shuffle the samples anew in every epoch; otherwise keep the order of the files."""
