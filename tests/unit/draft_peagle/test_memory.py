"""Segments, and activations that are computed again, bound what a step keeps for its backward pass."""

import pytest

from spec_draft_peagle.chains import Chains
from spec_draft_peagle.draft import PEagleDraft

from ..draft_batches import random_documents, step_arguments
from ..draft_parts import KeptForBackward, LiveBytes, make_target
from .cases import make_config, make_model, make_rule


def long_step(num_tokens: int, **options):
    """A model, and a batch of one document whose tokens are all supervised."""
    target = make_target()
    config = make_config(num_guesses=8, retention=1.0, **options)
    documents = random_documents(target, [num_tokens], 1, supervised=1.0)
    return make_model(target, config), *step_arguments(PEagleDraft(config), target, documents)


def kept(num_layers: int, *, recompute: bool) -> tuple[int, int]:
    """Bytes that are kept of the layers for the backward pass, and the number of rows and mask tokens."""
    module, batch, _, ops = long_step(300, num_layers=num_layers, checkpoint_activations=recompute)
    chains = Chains.of(batch, make_rule(module.config))
    (segment,) = chains.segments(None)
    with KeptForBackward() as counted:
        module.states(batch, chains, ops)
    return counted.num_bytes, segment.stop + int(segment.count_A.sum())


def test_a_further_layer_keeps_its_input_alone():
    per_row = {}
    for flag in (False, True):
        (fewer, rows), (more, _) = (kept(count, recompute=flag) for count in (2, 3))
        per_row[flag] = (more - fewer) / rows / 4
    width, queries, inner = 16, 4 * 8, 24
    assert per_row[True] == width
    assert per_row[False] > width + 2 * queries + 3 * inner


def most_bytes(segment_tokens: int | None, *, recompute: bool) -> int:
    """Bytes that a step forward and backward holds at its peak."""
    module, *arguments = long_step(
        200, num_layers=4, segment_tokens=segment_tokens, checkpoint_activations=recompute
    )
    with LiveBytes() as live:
        module(*arguments).loss.backward()
    return live.most


@pytest.mark.parametrize("segment_tokens", [None, 100])
def test_the_peak_falls_with_segments_and_without(segment_tokens):
    plain, again = (most_bytes(segment_tokens, recompute=flag) for flag in (False, True))
    assert again < 0.75 * plain


def kept_bytes(segment_tokens: int | None, num_tokens: int) -> int:
    """Bytes of the storages that the graph holds between forward and backward."""
    module, *arguments = long_step(num_tokens, segment_tokens=segment_tokens)
    with KeptForBackward() as counted:
        output = module(*arguments)
    output.loss.backward()
    return counted.num_bytes


def test_a_step_in_segments_keeps_less():
    whole, segments = kept_bytes(None, 300), kept_bytes(30, 300)
    assert segments < 0.5 * whole


def test_what_is_kept_is_linear_in_the_tokens():
    assert kept_bytes(30, 600) == pytest.approx(2 * kept_bytes(30, 300), rel=0.2)
