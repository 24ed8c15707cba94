"""Changes to a target's folder."""

import json

import pytest
from safetensors.torch import load_file, save_file

from spec_core.errors import TargetError
from spec_kit.targets.target_reader import read_target


def set_config(folder, **values):
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **values}
    file.write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))


def rewrite_weights(folder, **changed):
    """Replaces tensors (dots as ``__``); None removes one."""
    weights = load_file(folder / "model.safetensors")
    for name, value in changed.items():
        weights[name.replace("__", ".")] = value
    save_file({k: v for k, v in weights.items() if v is not None}, folder / "model.safetensors")


def assert_refused(folder, *words):
    with pytest.raises(TargetError) as caught:
        read_target(folder)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message
