"""Count the matrix products that a step cannot do without.

Three times the forward pass for what is trained, twice for a frozen head, once for the teacher, heads on labelled
rows only, and only those pairs of attention that are seen.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import torch
from measure import timed

if TYPE_CHECKING:
    from trainer_step_case import Problem

    from spec_kit.block_drafting import Blocks


def eagle3_flops(problem: Problem) -> float:
    """Return the floating-point operations of one Eagle3 step.

    What does not depend on the unrolled step (fusing the features; the embedding's half of q, k, v) counts once, and
    so do the first step's keys and values of every row; all else counts for the rows that a loss reads.
    """
    from spec_kit.chain_drafting import NeededRows

    case, target = problem.case, problem.target
    width, queries = target.hidden_size, target.num_heads * target.head_dim
    total, keys = case.sequences * case.tokens, target.num_kv_heads * target.head_dim
    needed = NeededRows.of(problem.batch, case.num_steps)
    once = 3 * width**2 + width * (queries + 2 * keys)
    per_row = width * 2 * queries + 3 * width * target.intermediate_size
    labelled_S = problem.denominators.tolist()
    trained = 2 * (total * (once + 2 * width * keys) + sum(needed.counts) * per_row)
    trained += 2 * sum(needed.counts[1:]) * 2 * width * keys
    for step in range(case.num_steps):
        pairs = int((problem.batch.position_T[needed.of_step(step)] + 1 + step).sum())
        trained += 2 * 2 * queries * pairs
    trained += 2 * sum(labelled_S) * case.draft_vocab_size * width
    return 3 * trained + 2 * labelled_S[0] * case.vocab_size * width


def dflash_flops(problem: Problem) -> float:
    """Return the floating-point operations of one DFlash step.

    The context's products run on every token that a block sees, the layers on every slot, the head on counted slots
    only.
    """
    case = problem.case
    blocks = _blocks(problem, case.block_size - 1)
    head = 2 * 2 * int(blocks.counted_A.sum()) * case.vocab_size * problem.target.hidden_size
    return 3 * _backbone_flops(problem, blocks, problem.batch.hidden_TNH.shape[1]) + head


def dspark_flops(problem: Problem) -> float:
    """Return the floating-point operations of one DSpark step.

    Every slot guesses; the last captured state is the teacher's, which costs the head once more; the Markov head's
    product with the vocabulary is trained.
    """
    case, shape = problem.case, problem.draft.shape(problem.target)
    blocks = _blocks(problem, case.block_size)
    rows = int(blocks.counted_A.sum()) * case.vocab_size
    head = 3 * 2 * rows * (problem.target.hidden_size + shape.markov_rank)
    return 3 * _backbone_flops(problem, blocks, problem.batch.hidden_TNH.shape[1] - 1) + head


def _blocks(problem: Problem, num_guesses: int) -> Blocks:
    from spec_kit.block_drafting import BlockRule, Blocks

    return Blocks.of(problem.batch, BlockRule(problem.case.num_anchors, num_guesses))


def _backbone_flops(problem: Problem, blocks: Blocks, num_features: int) -> float:
    """Return those of one forward pass up to the head."""
    case, target = problem.case, problem.target
    width, queries = target.hidden_size, target.num_heads * target.head_dim
    keys, slots = target.num_kv_heads * target.head_dim, len(blocks.anchor_A) * case.block_size
    seen_tokens = len(blocks.context_rows(problem.batch))
    context = seen_tokens * (num_features * width**2 + case.num_layers * 2 * width * keys)
    per_slot = width * (2 * queries + 2 * keys) + 3 * width * target.intermediate_size
    seen = int((blocks.anchor_A - blocks.start_A).sum()) * case.block_size + slots * case.block_size
    return 2 * context + case.num_layers * (2 * slots * per_slot + 4 * queries * seen)


def bare_tflops(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Return the TFLOP/s of a product of two random square matrices, the device's limit in the same process."""
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    module = torch.get_device_module(device)

    def products() -> None:
        for _ in range(10):
            left @ right
        module.synchronize()

    timed(products, 2)
    return 10 * 2 * size**3 / (statistics.median(timed(products, 3).wall_ms) * 1e9)


NECESSARY_FLOPS = {"eagle3": eagle3_flops, "dflash": dflash_flops, "dspark": dspark_flops}
