"""Count the matrix products that a step cannot do without.

Three times the forward pass for what is trained, twice for a frozen head, once for the teacher (at each token only
once, however many guesses follow it), heads on labelled rows only, and only those pairs of attention that are seen.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from measure import timed

if TYPE_CHECKING:
    from trainer_step_case import Problem

    from spec_kit.block_drafting import Blocks
    from spec_kit.chain_drafting import NeededRows


def eagle3_flops(problem: Problem) -> float:
    """Return the floating-point operations of one Eagle3 step.

    What does not depend on the unrolled step (fusing the features; the embedding's half of the first layer's input)
    counts once, and so do the first step's keys and values of every row. All else counts for the rows that a loss
    reads; of several layers, all but the last compute every row at the first step.
    """
    from spec_kit.chain_drafting import NeededRows

    case, target = problem.case, problem.target
    shape, width = problem.draft.shape(target), target.hidden_size
    needed, costs = NeededRows.of(problem.batch, case.num_steps), _attention_costs(shape)
    per_query = width * (costs.query_inputs + costs.outputs + 3 * target.intermediate_size)
    per_query += costs.query_latent
    per_key = width * costs.key_inputs + costs.key_latent
    total, keys = case.sequences * case.tokens, case.sequences * case.tokens + sum(needed.counts[1:])
    earlier = shape.num_layers - 1
    once = shape.num_captured * width**2 + width * (costs.query_inputs + costs.key_inputs)
    trained = 2 * (total * once + (sum(needed.counts) + earlier * keys) * per_query)
    trained += 2 * shape.num_layers * keys * per_key
    pairs = _pairs(problem, needed) + earlier * _pairs(problem, needed, all_at_first=True)
    trained += 2 * costs.pair * pairs
    labelled_S = problem.denominators.tolist()
    trained += 2 * sum(labelled_S) * shape.vocab_size * width
    return 3 * trained + 2 * labelled_S[0] * case.vocab_size * width


def mtp_flops(problem: Problem) -> float:
    """Return the floating-point operations of one step of an MTP head.

    The embedding's half of its input counts once for each token; the head is the target's, and frozen.
    """
    from spec_kit.chain_drafting import NeededRows

    case, target = problem.case, problem.target
    needed, width = NeededRows.of(problem.batch, case.num_steps), target.hidden_size
    queries, keys = target.num_heads * target.head_dim, target.num_kv_heads * target.head_dim
    total = case.sequences * case.tokens
    # A gate beside each query, and the output.
    per_query = width * (3 * queries + 3 * target.intermediate_size)
    trained = 2 * (total * width**2 + sum(needed.counts) * per_query)
    trained += 2 * (total + sum(needed.counts[1:])) * (width**2 + 2 * width * keys)
    trained += 2 * 2 * queries * _pairs(problem, needed)
    labelled_S = problem.denominators.tolist()
    return 3 * trained + 2 * (2 * sum(labelled_S) + labelled_S[0]) * case.vocab_size * width


def peagle_flops(problem: Problem) -> float:
    """Return the floating-point operations of one P-EAGLE step.

    In the first layer, the projections of a mask token's input are left out, because they are those of every other.
    In the last one, a row without a guess gives keys and values only. The teacher counts once for each guessed token.
    """
    from spec_draft_peagle.chains import ChainRule, Chains

    target, options = problem.target, problem.draft.options
    shape, width = problem.draft.shape(target), target.hidden_size
    rule = ChainRule(
        num_guesses=options.num_guesses,
        retention=options.retention,
        least_retention=options.least_retention,
    )
    chains = Chains.of(problem.batch, rule)
    (segment,), guesses = chains.segments(None), chains.guesses(None)
    queries, keys = target.num_heads * target.head_dim, target.num_kv_heads * target.head_dim
    rows, masks, counted = len(chains.count_R), len(segment.chain_C), int((chains.count_R > 0).sum())
    position, per_token = segment.position + 1, width * (queries + 3 * target.intermediate_size)
    trained = rows * (shape.num_captured * width**2 + width * (queries + 2 * keys))
    for layer in range(shape.num_layers):
        asking = counted if layer == shape.num_layers - 1 else rows
        projected = 0 if layer == 0 else masks
        trained += (asking + projected) * width * queries + (rows + projected) * 2 * width * keys
        trained += (asking + masks) * per_token
        pairs = int(position[rows:].sum())
        pairs += int(
            position[:rows][chains.count_R > 0].sum() if asking == counted else position[:rows].sum()
        )
        trained += 2 * queries * pairs
    trained += guesses.shape[1] * shape.vocab_size * width
    return 3 * 2 * trained + 2 * len(guesses[2].unique()) * target.vocab_size * width


@dataclass(frozen=True, kw_only=True)
class _AttentionCosts:
    """Channels that a layer's attention computes of one row, and multiplications of one pair of rows."""

    query_inputs: int
    """Channels of queries that come from the layer's input."""
    key_inputs: int
    query_latent: int = 0
    """Multiplications between a narrow latent and the queries' heads."""
    key_latent: int = 0
    outputs: int
    """Channels of the heads that the output projection reads."""
    pair: int


def _attention_costs(shape: Any) -> _AttentionCosts:
    heads = shape.num_heads
    if shape.attention == "mla":
        scored, latent = shape.qk_nope_head_dim + shape.qk_rope_head_dim, shape.kv_lora_rank
        return _AttentionCosts(
            query_inputs=shape.q_lora_rank,
            key_inputs=latent + shape.qk_rope_head_dim,
            query_latent=shape.q_lora_rank * heads * scored,
            key_latent=latent * heads * (shape.qk_nope_head_dim + shape.v_head_dim),
            outputs=heads * shape.v_head_dim,
            pair=heads * (scored + shape.v_head_dim),
        )
    queries = heads * shape.head_dim
    return _AttentionCosts(
        query_inputs=queries,
        key_inputs=2 * shape.num_kv_heads * shape.head_dim,
        outputs=queries,
        pair=2 * queries,
    )


def _pairs(problem: Problem, needed: NeededRows, all_at_first: bool = False) -> int:
    """Return the pairs of rows that attention needs over all unrolled steps."""
    position_T = problem.batch.position_T
    rows = [position_T[needed.row_N[:count]] + 1 + step for step, count in enumerate(needed.counts)]
    if all_at_first:
        rows[0] = position_T + 1
    return int(sum(seen.sum() for seen in rows))


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

    Every slot guesses; the last captured state is the teacher's; the Markov head's product with the vocabulary is
    trained.
    """
    case, shape, width = problem.case, problem.draft.shape(problem.target), problem.target.hidden_size
    blocks = _blocks(problem, case.block_size)
    rows = int(blocks.counted_A.sum())
    head = 2 * case.vocab_size * ((2 * rows + _taught_tokens(blocks)) * width + 3 * rows * shape.markov_rank)
    return 3 * _backbone_flops(problem, blocks, problem.batch.hidden_TNH.shape[1] - 1) + head


def dflash2_flops(problem: Problem) -> float:
    """Return the floating-point operations of one DFlash2 step.

    The convolutions' taps are computed for every slot; the last captured state is the teacher's.
    """
    case, shape = problem.case, problem.draft.shape(problem.target)
    width, blocks = problem.target.hidden_size, _blocks(problem, case.block_size - 1)
    head = 2 * (2 * int(blocks.counted_A.sum()) + _taught_tokens(blocks)) * case.vocab_size * width
    taps = 2 * 2 * case.num_layers * len(blocks.anchor_A) * case.block_size * shape.conv_taps * width
    selector = 2 * int(blocks.counted_A.sum()) * shape.selector_rank * (width + shape.selector_top_k)
    backbone = _backbone_flops(problem, blocks, problem.batch.hidden_TNH.shape[1] - 1)
    return 3 * (backbone + taps + selector) + head


def _blocks(problem: Problem, num_guesses: int) -> Blocks:
    from spec_kit.block_drafting import BlockRule, Blocks

    return Blocks.of(problem.batch, BlockRule(problem.draft.options, num_guesses))


def _taught_tokens(blocks: Blocks) -> int:
    """Return the number of tokens whose state is the teacher's for at least one guess."""
    pairs = zip(blocks.anchor_A.tolist(), blocks.counted_A.tolist(), strict=True)
    return len({anchor + guess for anchor, counted in pairs for guess in range(counted)})


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


NECESSARY_FLOPS = {
    "eagle3": eagle3_flops,
    "mtp": mtp_flops,
    "peagle": peagle_flops,
    "dflash": dflash_flops,
    "dflash2": dflash2_flops,
    "dspark": dspark_flops,
}
