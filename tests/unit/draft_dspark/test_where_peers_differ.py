"""Trainers of DSpark differ in these points; ours does as DeepSpec, the first one, unless a test says otherwise."""

import math
from functools import partial

import pytest
import torch

from spec_draft_dspark.draft import DSparkDraft
from spec_kit.block_drafting import Blocks

from ..block_steps import one_block, train_on
from ..draft_batches import denominators, make_batch, random_documents, supervision
from ..draft_parts import make_ops, make_target
from . import cases
from .cases import make_config, make_model

step = partial(train_on, cases)


def test_defaults_are_deepspecs():
    """speculators: blocks of 8, KL. ModelOpt: no confidence head."""
    draft = DSparkDraft(make_config(block_size=None, markov_rank=None, num_layers=None))
    shape, options = draft.shape(make_target()), draft.options
    assert (shape.block_size, shape.num_layers, shape.markov_rank, shape.num_features) == (7, 5, 256, 5)
    assert (options.gamma, options.ce_weight, options.l1_weight, options.confidence_weight) == (
        4,
        0.1,
        0.9,
        1,
    )
    assert shape.confidence
    assert shape.confidence_with_markov
    assert options.num_anchors == 6


def test_the_first_slot_guesses_the_token_behind_the_anchor():
    """As DeepSpec, and engines by default; folders of speculators may guess from the second (sample_from_anchor)."""
    document = one_block([2, 3])
    output, module = step([document], make_config())
    assert output.counts["accuracy"].tolist() == [1, 0, 0, 0]
    blocks = Blocks(torch.tensor([2]), torch.tensor([0]), torch.tensor([1]))
    states = module.states(make_batch([document], [0]), blocks, make_ops(make_target(), torch.float64))
    ops, w1, w2 = (
        make_ops(make_target(), torch.float64),
        module.markov_head.markov_w1.weight,
        module.markov_head.markov_w2.weight,
    )
    logits = states[0, 0] @ ops.head_VH.T + w2 @ w1[document.ids[2]]
    assert output.sums["accuracy"][0].item() == (logits.argmax() == document.ids[3])


def test_cross_entropys_label_is_the_datas_token():
    """As DeepSpec, SpecForge, ModelOpt, Automodel; speculators takes the teacher's arg-max."""
    document = one_block([2, 3])
    options = {"ce_weight": 1.0, "l1_weight": 0.0, "confidence": False}
    first, _ = step([document], make_config(**options))
    document.ids[3] = (document.ids[3] + 1) % 29
    second, _ = step([document], make_config(**options))
    assert first.loss.item() != pytest.approx(second.loss.item(), rel=1e-3)


def test_the_distance_is_not_halved():
    """DeepSpec's L1 is 0 to 2; speculators' paper recipe, "tv", is half of it."""
    document = one_block([2, 3])
    output, _ = step([document], make_config(ce_weight=0.0, l1_weight=1.0, confidence=False))
    acceptance = output.sums["acceptance"][0].item()
    assert 0 < acceptance < 1
    assert output.loss.item() == pytest.approx(2 * (1 - acceptance), rel=1e-9)


def test_the_divisor_is_the_sum_of_the_weights_over_the_global_batch():
    """As DeepSpec, SpecForge and Automodel, without their 1e-6; speculators divides by the count of slots, without
    the decay, and like ModelOpt on each rank by itself."""
    documents = random_documents(make_target(), [12, 9], 1, 6, torch.float64)
    config, counted = make_config(gamma=2.0), [0.0] * 4
    for sample in supervision(documents):
        for count in DSparkDraft(config).rule.draw(sample)[1].tolist():
            for guess in range(count):
                counted[guess] += 1
    expected = sum(count * math.exp(-guess / 2) for guess, count in enumerate(counted))
    assert denominators(DSparkDraft(config), documents).item() == pytest.approx(expected, rel=1e-12)


def test_slots_look_both_ways_and_at_the_whole_context():
    """speculators by default: windows of 2048, causal inside the block, as with ``draft.sliding_window``."""
    target = make_target()
    module = make_model(target, make_config(), torch.float64)
    (document,) = random_documents(target, [12], 4, 6, torch.float64)
    blocks, ops = Blocks(*torch.tensor([[9], [0], [1]])), make_ops(target, torch.float64)
    (slots,) = module.states(make_batch([document], [0]), blocks, ops)
    document.states[0] += 1
    (others,) = module.states(make_batch([document], [0]), blocks, ops)
    assert not torch.allclose(slots, others)
    assert module.shape.windows == (None, None)
    shorter = make_model(target, make_config(block_size=2), torch.float64)
    assert not torch.allclose(shorter.states(make_batch([document], [0]), blocks, ops)[0, 0], others[0])


def test_confidence_moves_the_states_but_not_by_its_target():
    """DeepSpec stops the gradient at 1 − ½ L1: with the confidence's weights 0, its loss moves nothing else."""
    document = one_block([2, 3, 4])
    config = make_config(ce_weight=1e-30, l1_weight=0.0)
    target = make_target()
    module = make_model(target, config, torch.float64)
    with torch.no_grad():
        module.confidence_head.proj.weight.zero_()
    batch, ops = make_batch([document], [0]), make_ops(target, torch.float64)
    module(batch, denominators(DSparkDraft(config), [document]), ops).loss.backward()
    assert module.confidence_head.proj.weight.grad.abs().max() > 1e-3
    assert module.fc.weight.grad.abs().max() < 1e-20
    assert module.markov_head.markov_w1.weight.grad.abs().max() < 1e-20
    with torch.no_grad():
        module.confidence_head.proj.weight.fill_(1.0)
    module(batch, denominators(DSparkDraft(config), [document]), ops).loss.backward()
    assert module.fc.weight.grad.abs().max() > 1e-6
    assert module.markov_head.markov_w1.weight.grad.abs().max() > 1e-6
