"""Tensors that must never exist in memory, and work that must not be done."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from spec_draft_dflash.config import DFlashConfig
from spec_draft_dflash.draft import DFlashDraft
from spec_kit.block_drafting import BlockLayout, BlockRule, Blocks, block_attention

from ..draft_batches import denominators, make_batch, random_documents, step_arguments
from ..draft_parts import (
    CPU,
    CountingOps,
    KeptForBackward,
    LargestOutput,
    make_ops,
    make_target,
    make_tensors,
)
from .cases import make_config, make_model

VOCAB, BLOCK = 2003, 8


def largest_tensor(num_tokens: int) -> int:
    target = make_target(vocab_size=VOCAB)
    config = DFlashConfig(block_size=BLOCK, num_layers=1, num_anchors=10_000, anchor_share=1.0, loss="ce")
    module, documents = make_model(target, config), random_documents(target, [num_tokens], 1, 6)
    arguments = step_arguments(DFlashDraft(config), target, documents)
    with LargestOutput() as largest:
        module(*arguments).loss.backward()
    return largest.numel


def test_memory_of_the_largest_tensor_is_linear_in_tokens(monkeypatch):
    monkeypatch.setattr("spec_core.ops.CHUNK_BYTES", 1 << 17)
    monkeypatch.setattr("spec_kit.block_drafting.attention.CHUNK_BLOCKS", 4)
    assert largest_tensor(400) == pytest.approx(2 * largest_tensor(200), rel=0.02)


def test_teacher_is_computed_once_for_each_token_before_a_guess_that_counts():
    target, config = make_target(), DFlashConfig(block_size=5, num_layers=1, loss="soft", anchor_share=1.0)
    ops = CountingOps(target, make_tensors(target), CPU, torch.float32)
    documents = random_documents(target, [20, 3, 1, 31], 7, 6)
    module = make_model(target, config)
    output = module(make_batch(documents, [0, 2, 0, 0]), denominators(DFlashDraft(config), documents), ops)
    drawn = Blocks.of(make_batch(documents, [0, 2, 0, 0]), BlockRule(config, 4))
    counted = zip(drawn.anchor_A.tolist(), drawn.counted_A.tolist(), strict=True)
    tokens = {anchor + guess for anchor, guesses in counted for guess in range(guesses)}
    assert ops.rows == len(tokens) < int(output.counts["accuracy"].sum()) / 2


@pytest.mark.parametrize(
    ("tail", "padding", "rows"), [(0, 0, 50), (0, 4, 54), (0, 9, 48), (20, 5, 28), (40, 0, 8)]
)
def test_context_that_no_block_sees_costs_nothing(tail, padding, rows):
    """The last ``tail`` of 50 tokens are not supervised; a few rows too many cost less than a copy of the others."""
    target, config = (
        make_target(),
        DFlashConfig(block_size=5, num_layers=2, num_anchors=100, anchor_share=1.0, num_features=3),
    )
    module, (document,) = make_model(target, config), random_documents(target, [50], 1, 3)
    document.mask[:] = torch.arange(50) < 50 - tail
    batch = make_batch([document], [0], padding=padding)
    with FlopCounterMode(display=False) as counter:
        module(batch, denominators(DFlashDraft(config), [document]), make_ops(target)).loss.backward()
    anchors = 49 - tail
    width, inner, queries, pairs = 16, 24, 4 * 8, 2 * 2 * 8
    per_row = 2 * 3 * width * width + 2 * 3 * width * pairs  # features get no gradient
    per_slot = 2 * 3 * (width * (2 * queries + pairs) + 3 * width * inner)
    guesses = sum(min(4, anchors - anchor) for anchor in range(anchors))
    expected = rows * per_row + anchors * 5 * per_slot + 2 * guesses * width * 29
    assert counter.get_flop_counts()["Global"][torch.ops.aten.mm] == 2 * expected


@pytest.mark.parametrize("window", [None, 16])
def test_attention_keeps_no_scores_for_the_backward_pass(window):
    """Linear in blocks: what autograd keeps is a fixed number of numbers per slot and token."""
    kept = {}

    for num_tokens in (256, 512):
        anchors = torch.arange(1, num_tokens, 2)
        layout = BlockLayout(anchors, torch.zeros_like(anchors), CPU)
        q = torch.randn(len(anchors), 4, 2, 8, requires_grad=True)
        own = [torch.randn(len(anchors), 4, 1, 8, requires_grad=True) for _ in range(2)]
        context = [torch.randn(num_tokens, 1, 8, requires_grad=True) for _ in range(2)]
        with KeptForBackward() as counted:
            block_attention(q, tuple(context), tuple(own), layout, window, False)
        kept[num_tokens] = counted.num_bytes
    assert kept[512] <= 2.05 * kept[256]


def kept(num_layers: int, *, recompute: bool) -> tuple[int, int]:
    """Bytes that are kept of the layers for the backward pass, and the number of slots."""
    options = {"num_layers": num_layers, "num_features": 3, "checkpoint_activations": recompute}
    target, config = make_target(), make_config(**options, num_anchors=512)
    documents = random_documents(target, [400], 1, 4)
    module, batch, ops = make_model(target, config), make_batch(documents, [0]), make_ops(target)
    blocks = Blocks.of(batch, BlockRule(config, 4))
    with KeptForBackward() as counted:
        states_ABH = module.states(batch, blocks, ops)
    return counted.num_bytes, states_ABH.shape[:2].numel()


def test_a_further_layer_keeps_its_input_alone():
    per_slot = {}
    for flag in (False, True):
        (fewer, slots), (more, _) = (kept(count, recompute=flag) for count in (2, 3))
        per_slot[flag] = (more - fewer) / slots / 4
    assert per_slot[True] == 16
    assert per_slot[False] > 16 * 16
