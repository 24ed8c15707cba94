"""Tensors that must never exist in memory, and work that must be done once."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from spec_backend_cpu.kernels import KERNELS
from spec_core import FindKernel, no_kernel
from spec_draft_eagle3.config import Eagle3Config
from spec_draft_eagle3.draft import Eagle3Draft
from spec_kit.chain_drafting import attention

from ..draft_batches import make_batch, random_documents, step_arguments
from ..draft_parts import CPU, CountingOps, LargestOutput, make_ops, make_target, make_tensors
from .cases import make_model

NUM_STEPS = 3


def largest_tensor(num_tokens: int, kernel: FindKernel) -> int:
    target, config = make_target(vocab_size=509), Eagle3Config(num_steps=NUM_STEPS)
    documents = random_documents(target, [num_tokens], seed=1, supervised=1.0)
    module, arguments = (
        make_model(target, config, kernel=kernel),
        step_arguments(Eagle3Draft(config), target, documents),
    )
    with LargestOutput() as largest:
        module(*arguments).loss.backward()
    return largest.numel


@pytest.mark.parametrize("kernel", [KERNELS.get, no_kernel], ids=["kernel", "chunked"])
def test_no_tensor_is_as_large_as_tokens_times_vocabulary_or_tokens_squared(kernel, monkeypatch):
    monkeypatch.setattr("spec_core.ops.CHUNK_BYTES", 1 << 14)
    monkeypatch.setattr(attention, "SCORE_BYTES", 1 << 16)
    num_tokens = 400
    largest = largest_tensor(num_tokens, kernel)
    assert largest < num_tokens * 509 / 4
    assert largest < num_tokens**2 / 4


def test_memory_of_the_largest_tensor_is_linear_in_tokens(monkeypatch):
    monkeypatch.setattr("spec_core.ops.CHUNK_BYTES", 1 << 14)
    assert largest_tensor(400, KERNELS.get) == pytest.approx(2 * largest_tensor(200, KERNELS.get), rel=0.02)


def test_teacher_is_computed_once_per_supervised_position(monkeypatch):
    target, config = make_target(), Eagle3Config(num_steps=4)
    chunk_rows = 5
    monkeypatch.setattr("spec_core.ops.CHUNK_BYTES", chunk_rows * 4 * (29 + 4 * 29))
    ops = CountingOps(target, make_tensors(target), CPU, torch.float32)
    documents = random_documents(target, [20, 3, 1, 31], seed=7)
    batch, counts, _ = step_arguments(Eagle3Draft(config), target, documents, [0, 2, 0, 0])
    make_model(target, config)(batch, counts, ops)
    assert ops.rows == int(counts[0])
    assert ops.largest == chunk_rows


def products(num_layers: int, num_prompt: int, num_answer: int, num_tail: int) -> int:
    """Multiplications in the matrix products of a step up to the head, on a document with one answer, and padding."""
    target = make_target()
    config = Eagle3Config(num_steps=NUM_STEPS, num_layers=num_layers, fc_norm=False)
    (document,) = random_documents(target, [num_prompt + num_answer + num_tail], seed=1)
    document.mask[:] = False
    document.mask[num_prompt : num_prompt + num_answer] = True
    batch = make_batch([document], [0], padding=3)
    with FlopCounterMode(display=False) as counter:
        states, _ = make_model(target, config).unroll(batch, make_ops(target))
        torch.cat(states).sum().backward()
    by_product = counter.get_flop_counts()["Global"]
    return sum(by_product.get(name, 0) for name in (torch.ops.aten.mm, torch.ops.aten.addmm)) // 2


@pytest.mark.parametrize("num_layers", [1, 2, 3])
@pytest.mark.parametrize(("prompt", "answer", "tail"), [(0, 30, 0), (9, 21, 5), (40, 12, 0), (50, 2, 7)])
def test_rows_that_no_loss_reads_cost_keys_and_values_only(num_layers, prompt, answer, tail):
    width, inner, queries, pairs = 16, 24, 4 * 8, 2 * 2 * 8
    rows = prompt + answer + tail + 3
    # A row of step s guesses the token two and s further on; it is needed where that or a later step's is supervised.
    end, first = prompt + answer - 2, max(0, prompt - 1 - NUM_STEPS)
    needed = [end - step - first for step in range(NUM_STEPS)]
    own = width * queries + queries * width + 3 * width * inner  # query, output projection, MLP
    whole = own + width * pairs
    trained = rows * width * (queries + pairs)  # the embedding's share
    trained += rows * (num_layers - 1) * whole + rows * width * pairs + needed[0] * own
    trained += num_layers * sum(needed[1:]) * whole
    fused = rows * 3 * width * width  # of features, which get no gradient
    assert products(num_layers, prompt, answer, tail) == 3 * trained + 2 * fused
