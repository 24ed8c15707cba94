"""Segments bound what a step keeps for its backward pass."""

from __future__ import annotations

import pytest
import torch

from ..draft_eagle3.cases import make_batch, make_target
from ..draft_parts import make_ops
from .cases import denominators, make_config, make_model, random_documents


def kept_bytes(segment_tokens: int | None, num_tokens: int) -> int:
    """Bytes of the storages that the graph holds between forward and backward."""
    target, config = make_target(), make_config(segment_tokens=segment_tokens, num_guesses=8, retention=1.0)
    (document,) = random_documents(target, [num_tokens], 1, supervised=1.0)
    document.rounds = None
    module, kept = make_model(target, config), dict[int, int]()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    arguments = make_batch([document], [0]), denominators(config, [document]), make_ops(target)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = module(*arguments)
    output.loss.backward()
    return sum(kept.values())


def test_a_step_in_segments_keeps_less():
    whole, segments = kept_bytes(None, 300), kept_bytes(30, 300)
    assert segments < 0.5 * whole


def test_what_is_kept_is_linear_in_the_tokens():
    assert kept_bytes(30, 600) == pytest.approx(2 * kept_bytes(30, 300), rel=0.2)
