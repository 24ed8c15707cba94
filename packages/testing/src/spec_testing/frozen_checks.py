"""Functions that check the products of an engine's embedding and head (E17)."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from spec_core import Engine
from spec_core.errors import TargetError
from spec_kit.targets import check_same_weights


def assert_frozen_products(engine: Engine, scratch: Path) -> None:
    """Assert that the engine's products are its target's, and differ from those of a target with another table."""
    target = engine.target
    if engine.frozen_products((0, 1), (1.0,) * target.hidden_size) is None:
        pytest.skip("the engine does not know its embedding and head")
    check_same_weights(engine, target)
    for name in {target.embedding_name, target.head_name}:
        folder = shutil.copytree(target.folder, scratch / name)
        _move_rows(folder, name)
        with pytest.raises(TargetError, match=engine.name):
            check_same_weights(engine, replace(target, folder=folder))


def _move_rows(folder: Path, name: str) -> None:
    """Give every token the row of the token before it."""
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            tensors[name] = tensors[name].roll(1, 0).contiguous()
            save_file(tensors, file, metadata={"format": "pt"})
