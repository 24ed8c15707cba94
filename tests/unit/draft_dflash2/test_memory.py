"""Tensors that must never exist in memory."""

from __future__ import annotations

from spec_draft_dflash2.draft import DFlash2Draft

from ..draft_batches import random_documents, step_arguments
from ..draft_parts import LargestOutput, make_target
from .cases import make_config, make_model

VOCAB, GUESSES = 2003, 7


def test_no_tensor_is_as_large_as_guesses_times_vocabulary(monkeypatch):
    monkeypatch.setattr("spec_core.ops.CHUNK_BYTES", 1 << 19)
    monkeypatch.setattr("spec_kit.block_drafting.attention.CHUNK_BLOCKS", 4)
    target, num_tokens = make_target(vocab_size=VOCAB), 400
    config = make_config(block_size=GUESSES + 1, num_layers=1, num_anchors=10_000)
    module, documents = make_model(target, config), random_documents(target, [num_tokens], 1, 6)
    arguments = step_arguments(DFlash2Draft(config), target, documents)
    with LargestOutput() as largest:
        module(*arguments).loss.backward()
    assert largest.numel < num_tokens * GUESSES * VOCAB / 20
