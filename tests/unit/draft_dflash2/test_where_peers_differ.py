"""Trainers of DFlash2 differ in these points; each test names whose behaviour ours is."""

from functools import partial

import pytest
import torch

from spec_draft_dflash2.draft import DFlash2Draft
from spec_kit.block_drafting import Blocks

from ..block_steps import one_block, train_on
from ..draft_batches import denominators, make_batch, random_documents
from ..draft_parts import make_ops, make_target
from . import cases
from .cases import make_config, make_model

TOKENS = {"ce_weight": 1.0, "soft_weight": 0.0}


step = partial(train_on, cases)


def test_defaults_are_speculators():
    """Blocks of 8, decay 4, the target's distribution, selector 1. SpecForge and TorchSpec learn from tokens."""
    sizes = dict.fromkeys(("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"))
    draft = DFlash2Draft(make_config(block_size=None, num_layers=None, **sizes))
    shape, options = draft.shape(make_target()), draft.options
    assert (shape.block_size, shape.num_layers, shape.num_features) == (8, 5, 5)
    assert (shape.conv_kernel_size, shape.conv_group_size) == (2, 16)
    assert (shape.selector_rank, shape.selector_top_k) == (256, 16)
    assert (options.gamma, options.ce_weight, options.soft_weight, options.selector_weight) == (4, 0, 1, 1)


def labels_without_and_with_a_candidate(config):
    """Two documents that differ in the guessed token: the head's least likely, and its likeliest."""
    document = one_block([2, 3])
    module = make_model(make_target(), config, torch.float64)
    ops, blocks = make_ops(make_target(), torch.float64), Blocks(*torch.tensor([[2], [0], [1]]))
    logits = module.states(make_batch([document], [0]), blocks, ops)[0, 1] @ ops.head_VH.T
    for label in (logits.argmin(), logits.argmax()):
        document.ids[3] = label
        yield document


def test_a_token_that_is_no_candidate_trains_the_head_alone():
    """As SpecForge; speculators puts the label into the place of the last candidate."""
    config = make_config(**TOKENS)
    missing, found = (
        {name: p.grad.abs().max().item() for name, p in module.named_parameters()} | output.metrics()
        for document in labels_without_and_with_a_candidate(config)
        for output, module in [step([document], config)]
    )
    for name in ("predecessor_codebook", "successor_codebook", "hidden_projection.weight"):
        assert missing[f"candidate_selector.{name}"] == 0
        assert found[f"candidate_selector.{name}"] > 1e-6
    assert (missing["selector_loss"][0], missing["recall"][0], found["recall"][0]) == (0, 0, 1)
    assert missing["fc.weight"] > 1e-6


def test_the_selectors_label_is_the_wanted_distribution():
    """The target's likeliest token alone is speculators' label. With ours the selector's loss is least where its
    distribution is the target's over the candidates."""
    document, config = one_block([2, 3]), make_config(selector_top_k=29)
    target, ops = make_target(), make_ops(make_target(), torch.float64)
    output, _ = step([document], config)
    teacher = ops.teacher_logits(document.states[2:3, -1]).double().softmax(-1)
    entropy = -(teacher * teacher.log()).sum().item()
    assert output.metrics()["selector_loss"][0] > entropy > 0.01
    assert target.vocab_size == config.selector_top_k


def test_the_selector_sees_the_datas_token_before_a_guess():
    """As all: the anchor before the first guess, then the tokens of the data, not those that the draft would draw."""
    document = one_block([2, 3, 4])
    blocks = Blocks(*torch.tensor([[2, 7], [0, 0], [2, 1]]))
    before_AS = blocks.tokens_before(make_batch([document], [0]), 3)
    assert before_AS[0].tolist() == document.ids[2:5].tolist()
    assert before_AS[1, :2].tolist() == document.ids[7:9].tolist()


def test_the_selectors_loss_moves_the_states_too():
    """As speculators, and SpecForge unless dflash2_selector_stop_gradient is set."""
    document = one_block([2, 3])
    for weight, moved in ((0.0, False), (1.0, True)):
        config = make_config(ce_weight=0.0, soft_weight=1e-30, selector_weight=weight * 1e30)
        _, module = step([document], config)
        assert (module.fc.weight.grad.abs().max().item() > 1e-6) is moved


def test_the_divisor_is_the_sum_of_the_weights_of_all_guesses():
    """As DSpark's trainers. speculators divides by the count without the decay; SpecForge, if so configured, divides
    the selector's part by the guesses whose label is a candidate."""
    document = one_block([2, 3, 4])
    config = make_config(gamma=2.0)
    expected = 2 + torch.tensor(-0.5).double().exp().item()  # anchor 2 has two guesses, anchor 3 one
    assert denominators(DFlash2Draft(config), [document]).item() == pytest.approx(expected, rel=1e-7)


def test_the_slot_of_the_last_known_token_guesses_nothing():
    """As all, and the engines; of speculators' folders those with sample_from_anchor are refused."""
    output, module = step([one_block([2, 3])], make_config())
    assert output.counts["accuracy"].tolist() == [1, 0, 0]
    assert module.shape.block_size == 4


def test_no_tap_crosses_a_block_and_the_context_is_not_convolved():
    """As all: slot 0 sees itself only. vLLM and SGLang begin anew at each served block."""
    target, config = make_target(), make_config(num_layers=1)
    module, ops = make_model(target, config, torch.float64), make_ops(target, torch.float64)
    (document,) = random_documents(target, [12], 4, 6, torch.float64)
    batch = make_batch([document], [0])
    both = module.states(batch, Blocks(*torch.tensor([[8, 9], [0, 0], [1, 1]])), ops)
    alone = module.states(batch, Blocks(*torch.tensor([[9], [0], [1]])), ops)
    torch.testing.assert_close(both[1:], alone)


def test_the_selectors_tables_are_no_hidden_matrices():
    """An optimizer for hidden matrices leaves them to another, as z-lab's embeddings are."""
    hints = DFlash2Draft(make_config()).shard_hints(make_target())
    selector = "candidate_selector"
    assert hints.is_vocabulary(f"{selector}.predecessor_codebook")
    assert hints.is_vocabulary(f"{selector}.successor_codebook")
    assert not hints.is_vocabulary(f"{selector}.hidden_projection.weight")
