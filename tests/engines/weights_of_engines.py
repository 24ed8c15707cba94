"""Folders whose weights an engine reads differently than the trainer, and how an engine is asked for what it has."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
from safetensors.torch import load_file, save_file

from spec_core.errors import TargetError
from spec_core.records import FeatureSchema
from spec_kit.targets import check_same_weights, read_target

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from spec_core import Engine, TargetSpec


def with_left_over_file(target: Path, folder: Path, name: str) -> Path:
    """Copy a target, beside whose file lies another with one tensor of other values; no index says which counts.

    vLLM and SGLang load every file in the order of their names, the trainer and Transformers only model.safetensors.
    """
    shutil.copytree(target, folder)
    left = load_file(folder / "model.safetensors")[name].roll(1, 0).contiguous()
    save_file({name: left}, folder / "older-save.safetensors", metadata={"format": "pt"})
    return folder


def assert_other_weights_are_noticed(
    new_engine: Callable[[TargetSpec], Engine], target: Path, scratch: Path, name: str, what: str
) -> None:
    """Start an engine for a target, and one for the folder with the left-over file: only that one is refused."""
    for folder in (target, with_left_over_file(target, scratch / "damaged", name)):
        described = read_target(folder)
        schema = FeatureSchema(layers=(2, 5), hidden_size=described.hidden_size, dtype="float32")
        with new_engine(described) as engine:
            engine.start(schema)
            if folder == target:
                check_same_weights(engine, described)
                continue
            with pytest.raises(TargetError, match=f"another {what} than the trainer"):
                check_same_weights(engine, described)
