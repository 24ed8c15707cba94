"""Segments bound what a step keeps for its backward pass."""

from __future__ import annotations

import pytest

from spec_draft_peagle.draft import PEagleDraft

from ..draft_batches import random_documents, step_arguments
from ..draft_parts import KeptForBackward, make_target
from .cases import make_config, make_model


def kept_bytes(segment_tokens: int | None, num_tokens: int) -> int:
    """Bytes of the storages that the graph holds between forward and backward."""
    target, config = make_target(), make_config(segment_tokens=segment_tokens, num_guesses=8, retention=1.0)
    (document,) = random_documents(target, [num_tokens], 1, supervised=1.0)
    module = make_model(target, config)
    with KeptForBackward() as kept:
        output = module(*step_arguments(PEagleDraft(config), target, [document]))
    output.loss.backward()
    return kept.num_bytes


def test_a_step_in_segments_keeps_less():
    whole, segments = kept_bytes(None, 300), kept_bytes(30, 300)
    assert segments < 0.5 * whole


def test_what_is_kept_is_linear_in_the_tokens():
    assert kept_bytes(30, 600) == pytest.approx(2 * kept_bytes(30, 300), rel=0.2)
