"""Two shards of the vocabulary, reduced through ``ops`` only, give the whole vocabulary's loss and gradients."""

from copy import deepcopy
from functools import partial

import pytest
import torch

from spec_core import LinearWeight
from spec_draft_dflash.kernels import DFlashKernels
from spec_draft_dflash.loss import BlockLoss
from spec_draft_dflash2.draft import DFlash2Draft
from spec_draft_dflash2.lilicorr.draft import LiLiCorrDraft
from spec_draft_dflash2.lilicorr.loss import PathInputs, PathLoss
from spec_draft_dflash2.loss import SelectorInputs, SelectorLoss
from spec_draft_dspark.loss import GuessLoss, HeadInputs
from spec_kit.block_drafting import (
    BlockConfig,
    BlockHead,
    BlockKernels,
    BlockRule,
    Blocks,
    CountedGuesses,
    guess_weights,
)
from spec_kit.chain_drafting import ChainKernels, HeadLoss, SupervisedRows

from .draft_batches import decode, make_batch, random_documents
from .draft_dflash2 import cases as dflash2_cases
from .draft_dspark import cases as dspark_cases
from .draft_lilicorr import cases as lilicorr_cases
from .draft_parts import CPU, assert_shards_agree, make_target


def drawing():
    generator = torch.Generator().manual_seed(1)
    return lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator)


def head_of(ops, reduced):
    """The head of a block draft: all rows, or those of even ids."""
    ids_V = torch.arange(*ops.vocab_range)
    if not reduced:
        return BlockHead(ops.head, ids_V)
    kept = torch.arange(29) % 2 == 0
    ids_V = ids_V[kept[ids_V]]
    return BlockHead(ops.head.take(ids_V - ops.vocab_range[0]), ids_V, kept)


class BlockStep:
    """A step of random inputs of a loss of blocks with so many guesses."""

    def __init__(self, guesses, judged=False):
        documents = random_documents(make_target(), [14, 9], 3, num_states=6, dtype=torch.float64)
        if judged:
            decode(documents, seed=2)
        self.batch = make_batch(documents, [1, 0])
        self.blocks = Blocks.of(self.batch, BlockRule(BlockConfig(num_anchors=50, anchor_share=1), guesses))
        self.places = len(self.blocks.anchor_A), guesses

    def output(self, loss, inputs):
        counted = CountedGuesses.of(self.blocks, CPU)
        output = loss(inputs, self.batch, counted, torch.tensor([7.0, 5.0, 2.0], dtype=torch.float64))
        output.loss.backward()
        return output


def dflash(ops, kind, reduced, opd=False):
    step = BlockStep(4, opd)
    states = drawing()(*step.places, 16).requires_grad_()
    weight_S = guess_weights(4, 2.5)
    parts = {"ops": ops, "head": head_of(ops, reduced), "kernels": DFlashKernels()}
    loss = BlockLoss(**parts, kind=kind, weight_S=weight_S, alpha=0.5, opd=opd)
    return step.output(loss, states), [states.grad]


def dflash2(ops, top_k, reduced, opd=False):
    step, draw, rank = BlockStep(3, opd), drawing(), dflash2_cases.SIZES["selector_rank"]
    sizes = {"selector_top_k": top_k, **({"vocab_size": 15} if reduced else {})}
    config = dflash2_cases.make_config(**sizes, ce_weight=0.4, soft_weight=0.6, opd=opd)
    shapes = (*step.places, 16), (*step.places, rank), (29, rank)
    inputs = SelectorInputs(*(draw(*shape).requires_grad_() for shape in shapes))
    shape = DFlash2Draft(config).shape(make_target())
    weight_S = guess_weights(3, 4.0)
    parts = {"ops": ops, "head": head_of(ops, reduced), "kernels": BlockKernels()}
    loss = SelectorLoss(**parts, options=config, shape=shape, weight_S=weight_S)
    return step.output(loss, inputs), [tensor.grad for tensor in inputs.tensors]


def lilicorr(ops, config, head):
    """The path head's weights are whole on each shard."""
    step, draw, head = BlockStep(3, config.opd), drawing(), deepcopy(head)
    states, anchors = (draw(*shape).requires_grad_() for shape in ((*step.places, 16), (step.places[0], 16)))
    loss = PathLoss(
        ops=ops,
        head=head_of(ops, reduced=False),
        kernels=BlockKernels(),
        options=config,
        shape=LiLiCorrDraft(config).shape(make_target()),
        weight_S=guess_weights(3, 4.0),
        path_head=head,
    )
    has_anchor = step.blocks.anchor_A > step.blocks.start_A
    denominators = torch.tensor([7.0, 9.0, 5.0, 2.0], dtype=torch.float64)
    output = loss(PathInputs(states, anchors, has_anchor), step.batch, step.blocks, denominators)
    output.loss.backward()
    return output, [states.grad, anchors.grad, *(weight.grad for weight in head.parameters())]


def dspark(ops, confidence, reduced, opd=False):
    """W2's gradient is of the local rows, placed at their tokens."""
    step, draw, rank = BlockStep(4, opd), drawing(), dspark_cases.RANK
    head, states, bias = head_of(ops, reduced), draw(*step.places, 16), draw(*step.places, rank)
    table, raw = draw(29, rank), draw(*step.places)
    inputs = HeadInputs(
        states_ASH=states.requires_grad_(),
        bias_ASr=bias.requires_grad_(),
        bias_Vr=table.requires_grad_()[head.ids_V],
        confidence_AS=raw.requires_grad_() if confidence else None,
    )
    options, weight_S = dspark_cases.make_config(opd=opd), guess_weights(4, 4.0)
    loss = GuessLoss(ops=ops, head=head, kernels=BlockKernels(), options=options, weight_S=weight_S)
    output = step.output(loss, inputs)
    grads = [states.grad, bias.grad, table.grad[slice(*ops.vocab_range)]]
    return output, grads + ([raw.grad] if confidence else [])


def eagle3(ops, kind, num_weights=1):
    """The head's gradient is of the local rows; its rows are those of even ids."""
    documents = random_documents(make_target(), [14, 9], seed=3, dtype=torch.float64)
    if num_weights == 2:
        decode(documents, seed=2)
    batch, draw = make_batch(documents, [1, 0]), drawing()
    states, head_VH = draw(3, 24, 16).requires_grad_(), draw(29, 16).requires_grad_()
    vocab_mask_V, (first, stop) = torch.arange(29) % 2 == 0, ops.vocab_range
    ids_V = torch.arange(first, stop)[vocab_mask_V[first:stop]]
    vocabulary = {"head": LinearWeight(head_VH[ids_V]), "ids_V": ids_V, "vocab_mask_V": vocab_mask_V}
    loss = HeadLoss(**vocabulary, kind=kind, ops=ops, kernels=ChainKernels())
    weight_WS = torch.tensor([[0.5, 0.25, 0.125], [0.3, 0.2, 0.1]][:num_weights], dtype=torch.float64)
    output = loss(list(states.unbind()), batch.hidden_TNH[:, -1], SupervisedRows.of(batch), weight_WS)
    output.loss.backward()
    return output, [states.grad, head_VH.grad[first:stop]]


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("kind", ["ce", "dpace", "soft", "lk_alpha", "lk_lambda"])
def test_shards_of_dflash_agree_with_the_whole(kind, reduced):
    assert_shards_agree(partial(dflash, kind=kind, reduced=reduced))


@pytest.mark.parametrize(
    ("cut", "top_k", "reduced"), [(17, 5, False), (26, 5, False), (17, 29, False), (24, 5, True)], ids=str
)
def test_shards_of_dflash2_agree_with_the_whole(cut, top_k, reduced):
    """Also where a shard has fewer tokens than there are candidates."""
    assert_shards_agree(partial(dflash2, top_k=top_k, reduced=reduced), cut)


@pytest.mark.parametrize("cut", [17, 26])
def test_shards_of_lilicorr_agree_with_the_whole(cut):
    """Also where a shard has fewer tokens than there are candidates."""
    options = {"lilicorr_candidate_topk": 16, "soft_weight": 0.6, "margin_weight": 0.3}
    config = lilicorr_cases.make_config(**options)
    head = lilicorr_cases.make_model(make_target(), config, torch.float64).lilicorr
    assert_shards_agree(partial(lilicorr, config=config, head=head), cut)


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("confidence", [True, False])
def test_shards_of_dspark_agree_with_the_whole(confidence, reduced):
    assert_shards_agree(partial(dspark, confidence=confidence, reduced=reduced), rows=[2])


@pytest.mark.parametrize("kind", ["ce", "lk_alpha", "lk_lambda"])
def test_shards_of_eagle3_agree_with_the_whole(kind):
    assert_shards_agree(partial(eagle3, kind=kind), rows=[1])


def test_shards_of_judged_guesses_agree_with_the_whole():
    assert_shards_agree(partial(eagle3, kind="ce", num_weights=2), rows=[1])


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("kind", ["ce", "lk_lambda"])
def test_shards_of_dflash_with_draft_opd_agree_with_the_whole(kind, reduced):
    assert_shards_agree(partial(dflash, kind=kind, reduced=reduced, opd=True))


@pytest.mark.parametrize("reduced", [False, True])
def test_shards_of_dspark_with_draft_opd_agree_with_the_whole(reduced):
    assert_shards_agree(partial(dspark, confidence=True, reduced=reduced, opd=True), rows=[2])


@pytest.mark.parametrize(("cut", "reduced"), [(17, False), (24, True)])
def test_shards_of_dflash2_with_draft_opd_agree_with_the_whole(cut, reduced):
    assert_shards_agree(partial(dflash2, top_k=5, reduced=reduced, opd=True), cut)


def test_shards_of_lilicorr_with_draft_opd_agree_with_the_whole():
    config = lilicorr_cases.make_config(lilicorr_candidate_topk=16, opd=True)
    head = lilicorr_cases.make_model(make_target(), config, torch.float64).lilicorr
    assert_shards_agree(partial(lilicorr, config=config, head=head))
