"""Check a copy of a target in which a trained head replaces the target's own head."""

from __future__ import annotations

import json

import torch
from safetensors.torch import load_file


def is_constant(name):
    return name.endswith("e_score_correction_bias")


def assert_copied_around_the_head(target, copy, head):
    """The folder ``copy`` has the bytes of the folder ``target`` outside the head, and there the bytes of ``head``.

    All weights of ``head`` differ from the target's, and its constants are the target's."""
    trained, found = load_file(head / "model.safetensors"), set()
    for file in target.iterdir():
        old, new = file.read_bytes(), (copy / file.name).read_bytes()
        if file.suffix != ".safetensors":
            assert old == new
            continue
        length = 8 + int.from_bytes(old[:8], "little")
        assert old[:length] == new[:length]
        for name, place in json.loads(old[8:length]).items():
            first, stop = (length + offset for offset in place["data_offsets"])
            expected = old[first:stop]
            if name in trained:
                found.add(name)
                expected = trained[name].view(torch.uint8).numpy().tobytes()
                assert (expected == old[first:stop]) == is_constant(name), name
            assert new[first:stop] == expected, name
    assert found == trained.keys()
