"""Tensors that must never exist in memory."""

from __future__ import annotations

import pytest

from spec_draft_dspark.draft import DSparkDraft

from ..draft_batches import random_documents, step_arguments
from ..draft_parts import LargestOutput, make_target
from .cases import make_config, make_model

VOCAB, GUESSES = 2003, 7


@pytest.mark.parametrize("head", ["vanilla", "rnn"])
def test_no_tensor_is_as_large_as_guesses_times_vocabulary(head, monkeypatch):
    """The Markov bias is as wide as the vocabulary, and the teacher's distributions are."""
    monkeypatch.setattr("spec_core.ops.CHUNK_BYTES", 1 << 19)
    monkeypatch.setattr("spec_kit.block_drafting.attention.CHUNK_BLOCKS", 4)
    target, num_tokens = make_target(vocab_size=VOCAB), 400
    config = make_config(block_size=GUESSES, num_layers=1, num_anchors=10_000, markov_head=head)
    module, documents = make_model(target, config), random_documents(target, [num_tokens], 1, 6)
    arguments = step_arguments(DSparkDraft(config), target, documents)
    with LargestOutput() as largest:
        module(*arguments).loss.backward()
    assert largest.numel < num_tokens * GUESSES * VOCAB / 20
