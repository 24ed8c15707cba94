"""Loss, every gradient and the metrics of a step against the dense float64 reference."""

from dataclasses import replace

import pytest
import torch

from spec_core.records import Supervision
from spec_draft_eagle3.config import Eagle3Config
from spec_draft_eagle3.draft import Eagle3Draft
from spec_kit.chain_drafting import NeededRows, attention
from spec_kit.layers import TargetOps

from ..draft_batches import GAPS, LENGTHS, LLAMA3, YARN, decode, make_batch, random_documents, step_arguments
from ..draft_parts import CPU, make_target, make_tensors
from ..draft_steps import DraftStepSuite, assert_each_precision, assert_equals_the_reference, run_reference
from . import cases
from .cases import KERNEL_AND_CHUNKED, MLA, PUBLISHED, make_config, make_model

WITHOUT_NORMS = {"fc_norm": False, "norm_output": False}
CASES = {
    "plain": ({}, {}),
    "reduced vocabulary": ({"vocab_size": 11}, {}),
    "one step": ({"num_steps": 1}, {}),
    "seven steps": ({"num_steps": 7, "step_decay": 0.5}, {}),
    "no norms": (WITHOUT_NORMS, {}),
    "fc norm": ({"norm_output": False}, {}),
    "norm output": ({"fc_norm": False}, {}),
    "no norms, reduced": ({**WITHOUT_NORMS, "vocab_size": 11}, {}),
    "lk alpha": ({"loss": "lk_alpha"}, {}),
    "lk alpha, reduced": ({"loss": "lk_alpha", "vocab_size": 17}, {}),
    "lk lambda": ({"loss": "lk_lambda"}, {}),
    "lk lambda, reduced": ({"loss": "lk_lambda", "vocab_size": 17}, {}),
    "opd, nothing judged": ({"opd": True}, {}),
    "llama3 rope": ({}, {"rope": LLAMA3}),
    "yarn rope": ({}, {"rope": YARN}),
    "two layers": ({"num_layers": 2}, {}),
    "three layers, no norms, reduced": (
        {**WITHOUT_NORMS, "num_layers": 3, "vocab_size": 11},
        {"rope": LLAMA3},
    ),
    "no groups, scaled logits": ({}, {"num_kv_heads": 4, "logit_scale": 0.3}),
    "mla": (MLA, {}),
    "mla, yarn": (MLA, {"rope": YARN}),
    "mla, two layers, no norms, reduced": ({**MLA, **WITHOUT_NORMS, "num_layers": 2, "vocab_size": 11}, {}),
    "mla, one head, values as wide as keys": ({**MLA, "v_head_dim": 10}, {"num_heads": 1, "num_kv_heads": 1}),
    "norm before residual": ({"norm_before_residual": True}, {}),
    "norm before residual, mla, two layers": ({**MLA, "norm_before_residual": True, "num_layers": 2}, {}),
    "norm before fc": ({**WITHOUT_NORMS, "norm_before_fc": True}, {}),
    "q and k norms": ({"qk_norm": True}, {"rope": LLAMA3}),
    "every published norm, two layers, reduced": ({**PUBLISHED, "num_layers": 2, "vocab_size": 11}, {}),
    "window": ({"sliding_window": 5}, {}),
    "window, two layers, reduced": ({"sliding_window": 8, "num_layers": 2, "vocab_size": 11}, {}),
    "one key head": ({}, {"num_kv_heads": 1, "num_layers": 36}),
}


class TestEagle3Step(DraftStepSuite):
    cases = cases
    few_tokens = 6
    checkpointed = (
        {},
        {**WITHOUT_NORMS, **PUBLISHED, "num_steps": 3, "num_layers": 2, "vocab_size": 11},
        {"num_steps": 3, "num_layers": 2, **MLA},
    )
    kernels = KERNEL_AND_CHUNKED

    @pytest.fixture(params=[{}, {"vocab_size": 4}], ids=["full", "reduced"])
    def options(self, request):
        return request.param

    def draw_config(self, draw):
        flags = {name: draw.random() < 0.5 for name in ("fc_norm", "norm_output")}
        vocab_size, kind = draw.choice([None, 5, 20]), draw.choice(["ce", "lk_alpha", "lk_lambda"])
        attention = draw.choice([{}, MLA, {"sliding_window": draw.randint(7, 12)}])
        return make_config(
            num_steps=draw.randint(1, 6), vocab_size=vocab_size, loss=kind, **flags, **attention
        )

    def expected_metrics(self, result):
        assert sum(result.agreed) > 20
        assert result.chain_sum > result.counted[0] + 10
        assert result.chain_sum_data > result.counted[0] + 5
        sums = {"accuracy": result.agreed, "acceptance": result.acceptance, "step_loss": result.step_loss}
        lengths = {"": result.chain_sum, "_t1": result.chain_sum_t1, "_data": result.chain_sum_data}
        return (
            sums | {"acceptance_t1": result.chance},
            {f"acceptance_length{name}": total / result.counted[0] for name, total in lengths.items()},
        )


@pytest.fixture
def small_chunks(monkeypatch):
    """The chunked attention is computed in chunks of six or seven queries."""
    monkeypatch.setattr(attention, "SCORE_BYTES", 4 * 4 * 23 * 7)


@pytest.mark.parametrize(("options", "changes"), CASES.values(), ids=CASES.keys())
def test_loss_and_every_gradient_equal_the_dense_reference(options, changes, small_chunks, monkeypatch):
    # Three positions per chunk, so that gradients are summed over several chunks.
    monkeypatch.setattr("spec_core.ops.CHUNK_BYTES", 3 * 4 * (29 + 4 * 29))
    target = make_target(**changes)
    documents = random_documents(target, LENGTHS, seed=5)
    assert_each_precision(cases, make_config(**options), target, documents, kernels=KERNEL_AND_CHUNKED)


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("share", [0.05, 0.5, 1.0])
@pytest.mark.parametrize("has_prompts", [True, False], ids=["prompts first", "scattered"])
def test_any_share_of_supervised_tokens_equals_the_dense_reference(
    num_layers, share, has_prompts, small_chunks
):
    """Rows that no loss reads are left out: behind it the reference computes every row of every step."""
    target, config = make_target(), Eagle3Config(num_steps=4, num_layers=num_layers, vocab_size=20)
    documents = random_documents(target, LENGTHS, seed=7)
    for document in documents:
        length = len(document.ids)
        place = torch.arange(length) / length if has_prompts else torch.rand(length)
        document.mask = place >= 1 - share
    reference = run_reference(cases, make_model(target, config, torch.float64), documents, target)
    for kernel in KERNEL_AND_CHUNKED:
        module = make_model(target, config, torch.float64, kernel=kernel)
        assert_equals_the_reference(cases, module, documents, target, (GAPS, 2), 1e-9, reference)


@pytest.mark.parametrize(("num_layers", "options"), [(1, {}), (2, MLA)], ids=["one layer", "two, mla"])
def test_rows_that_are_nearly_all_needed_are_computed_in_place(num_layers, options, monkeypatch):
    monkeypatch.setattr(attention, "SCORE_BYTES", 4 * 4 * 150 * 16)  # 16 queries of the longer document
    target, config = make_target(), Eagle3Config(num_steps=2, num_layers=num_layers, **options)
    documents = random_documents(target, [90, 150], seed=7)
    for document in documents:
        document.mask[:] = True
    gaps = [0, 2]
    assert NeededRows.of(make_batch(documents, gaps), config.num_steps).are_all
    assert_each_precision(cases, config, target, documents, gaps, KERNEL_AND_CHUNKED)


@pytest.mark.parametrize(
    "options", [{"loss": kind} for kind in ("ce", "lk_alpha", "lk_lambda")] + [{"opd": True}]
)
def test_guesses_that_were_judged_equal_the_dense_reference(options, monkeypatch):
    """Rounds of three guesses, of which a draft with two steps trains two, and one with five steps all three."""
    monkeypatch.setattr("spec_core.ops.CHUNK_BYTES", 3 * 4 * (29 + 4 * 29))
    for steps in (2, 5):
        target, config = make_target(), Eagle3Config(num_steps=steps, vocab_size=17, **options)
        documents = random_documents(target, LENGTHS, seed=5)
        decode(documents, seed=steps)
        module = make_model(target, config, torch.float64)
        output, result = assert_equals_the_reference(cases, module, documents, target, (GAPS, 0))
        assert output.loss.item() > 0.1
        assert [count > 0 for count in result.counted] == [step < 3 for step in range(steps)]
        assert result.refused is None or min(result.refused[:3]) > 0


def test_an_evaluation_has_the_same_loss_with_opd():
    """Its batches say nothing of guesses, so there is nothing to judge."""
    target, losses = make_target(), []
    documents = random_documents(target, LENGTHS, seed=5)
    for opd in (False, True):
        config = Eagle3Config(num_steps=3, opd=opd)
        batch, denominators, ops = step_arguments(Eagle3Draft(config), target, documents)
        module = make_model(target, config)
        losses.append(module(replace(batch, evaluates=True), denominators, ops).loss.item())
    assert losses[0] == losses[1] > 1


def test_fully_supervised_chain_that_always_agrees_has_full_length():
    """The draft's head and states cannot tell tokens apart, nor can the target: all agree, so 1 + S where every
    later step is labelled too."""
    target, config = make_target(), Eagle3Config(num_steps=3)
    module, tensors = make_model(target, config), make_tensors(target)
    with torch.no_grad():
        module.lm_head.weight.zero_()
    ops = TargetOps(target, replace(tensors, head_VH=torch.zeros_like(tensors.head_VH)), CPU, torch.float32)
    (document,) = random_documents(target, [12], 1)
    document.mask[:] = True
    metrics = module(*step_arguments(Eagle3Draft(config), target, [document])[:2], ops).metrics()
    assert metrics["accuracy"] == [1.0, 1.0, 1.0]
    # Ten rows are labelled at step 0; the last two of them at one and two steps only.
    assert metrics["acceptance_length"] == pytest.approx((8 * 4 + 3 + 2) / 10)


@pytest.mark.parametrize("vocab_size", [None, 11])
def test_features_that_are_not_finite_give_a_loss_that_is_not(vocab_size):
    """A run ends with that loss, and its cause: no arg-max is looked up outside the vocabulary."""
    target, config = make_target(), Eagle3Config(num_steps=2, vocab_size=vocab_size)
    module, documents = make_model(target, config), random_documents(target, [9, 7], seed=5)
    documents[0].states[:] = torch.nan
    output = module(*step_arguments(Eagle3Draft(config), target, documents))
    assert output.loss.isnan()


def test_denominators_count_supervised_tokens_with_enough_tokens_before_them():
    mask = torch.tensor([True, True, True, False, True, True])
    sample = Supervision(sample_id=0, epoch=0, loss_mask=mask)
    short = Supervision(sample_id=1, epoch=0, loss_mask=torch.tensor([True]))
    got = Eagle3Draft(Eagle3Config(num_steps=5)).denominators([sample, short])
    assert got.dtype == torch.float64
    assert got.tolist() == [3, 2, 2, 1, 0]
