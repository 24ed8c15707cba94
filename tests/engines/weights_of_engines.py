"""Folders whose weights an engine reads differently than the trainer, and how an engine is asked for what it has."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from safetensors.torch import load_file, save_file

from spec_core import Engine, TargetSpec
from spec_core.errors import TargetError
from spec_core.records import FeatureSchema
from spec_kit.targets import check_same_weights, read_target

if TYPE_CHECKING:
    from torch import Tensor


def add_left_over_file(folder: Path, name: str) -> None:
    """Put a file beside the target's, with one tensor of other values; no index says which counts.

    vLLM and SGLang load every file in the order of their names. The trainer refuses the folder if it finds the file
    there, and does not see a file that comes later.
    """
    save_file(_rolled(folder, name), folder / "older-save.safetensors", metadata={"format": "pt"})


def as_loaded(target: Path, folder: Path, name: str) -> Path:
    """Copy a target with the values that an engine has if it loads the left-over file, too."""
    shutil.copytree(target, folder)
    tensors = load_file(target / "model.safetensors") | _rolled(target, name)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _rolled(target: Path, name: str) -> dict[str, Tensor]:
    return {name: load_file(target / "model.safetensors")[name].roll(1, 0).contiguous()}


def assert_other_weights_are_noticed(
    new_engine: Callable[[TargetSpec], Engine], target: Path, scratch: Path, name: str, what: str
) -> None:
    """Start an engine once the left-over file has come: only ``what``, whose tensor lies there, is refused."""
    damaged = read_target(shutil.copytree(target, scratch / "damaged"))
    add_left_over_file(damaged.folder, name)
    schema = FeatureSchema(layers=(2, 5), hidden_size=damaged.hidden_size, dtype="float32")
    with new_engine(damaged) as engine:
        engine.start(schema)
        with pytest.raises(TargetError, match=f"another {what} than the trainer"):
            check_same_weights(engine, read_target(target))
        check_same_weights(engine, read_target(as_loaded(target, scratch / "loaded", name)))
