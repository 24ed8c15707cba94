"""Loss, every gradient and the metrics of a step against the dense float64 reference."""

import pytest
import torch

from spec_backend_cpu.kernels import KERNELS
from spec_core import no_kernel
from spec_draft_peagle.draft import PEagleDraft

from ..block_proposals import assert_rounds_are_counted
from ..draft_batches import GAPS, LENGTHS, LLAMA3, random_documents, step_arguments
from ..draft_parts import assert_gradients, gradients, make_target
from ..draft_steps import DraftStepSuite, assert_each_precision
from . import cases
from .cases import make_config, make_model

CASES = {
    "cross-entropy": ({}, {}),
    "lk_alpha": ({"loss": "lk_alpha"}, {}),
    "lk_lambda": ({"loss": "lk_lambda", "vocab_size": 11}, {}),
    "nothing dropped": ({"retention": 1.0}, {}),
    "much dropped": ({"retention": 0.3, "least_retention": 0.0}, {}),
    "reduced vocabulary": ({"vocab_size": 9}, {}),
    "one guess": ({"num_guesses": 1}, {}),
    "chains longer than documents": ({"num_guesses": 40, "retention": 1.0}, {}),
    "one layer": ({"num_layers": 1}, {}),
    "three layers in segments": ({"num_layers": 3, "segment_tokens": 4, "retention": 1.0}, {}),
    "a segment for each row": ({"segment_tokens": 1, "vocab_size": 9}, {}),
    "norms of speculators": ({"norm_before_residual": True, "norm_before_fc": True, "segment_tokens": 4}, {}),
    "llama3 rope": ({}, {"rope": LLAMA3}),
    "scaled logits": ({}, {"logit_scale": 0.3}),
}


class TestPEagleStep(DraftStepSuite):
    cases = cases
    few_tokens = 2
    checkpointed = (
        {},
        {"vocab_size": 9, "segment_tokens": 5, "num_layers": 3},
        {"segment_tokens": 20, "retention": 1.0},
    )
    kernels = (KERNELS.get, no_kernel)

    @pytest.fixture
    def options(self):
        return {"segment_tokens": 6}

    def draw_config(self, draw):
        retention, segment = draw.choice([0.5, 0.8, 1.0]), draw.choice([None, 1, 7, 100])
        return make_config(num_guesses=draw.randint(1, 6), retention=retention, segment_tokens=segment)

    def expected_metrics(self, result):
        """The chance to agree up to each guess counts as often as documents, without drops, reach it."""
        assert all(result.prefixes)
        sums = {"accuracy": result.agreed, "acceptance": result.acceptance, "guess_loss": result.guess_loss}

        def length(prefixes):
            chances = (prefix / n for prefix, n in zip(prefixes, result.counted, strict=True))
            reached = sum(chance * n for chance, n in zip(chances, result.reached, strict=True))
            return 1 + reached / result.counted[0]

        prefixes = {"": result.prefixes, "_t1": result.prefixes_t1, "_data": result.prefixes_data}
        lengths = {f"acceptance_length{name}": length(found) for name, found in prefixes.items()}
        return sums | {"acceptance_t1": result.chance}, lengths

    @pytest.mark.parametrize(("options", "changes"), CASES.values(), ids=CASES.keys())
    @pytest.mark.usefixtures("small_chunks")
    def test_loss_and_every_gradient_equal_the_dense_reference(self, options, changes):
        target, config = make_target(**changes), make_config(**options)
        documents, masked = random_documents(target, LENGTHS, 5), config.num_guesses > 1
        kernels = KERNELS.get, KERNELS.get
        _, module = assert_each_precision(cases, config, target, documents, GAPS, kernels, 2e-4)
        for name, grad in gradients(module).items():
            assert grad.any() or (name == "mask_hidden" and not masked)


@pytest.mark.parametrize(
    ("segment_tokens", "kernel"), [(1, None), (5, no_kernel), (1000, None)], ids=["one", "plain", "whole"]
)
def test_segments_change_nothing(segment_tokens, kernel):
    """Documents lie across their edges; losses, metrics and gradients are those of the whole batch at once."""
    target = make_target()
    documents = random_documents(target, LENGTHS, 5, dtype=torch.float64)
    kernels = {} if kernel is None else {"kernel": kernel}
    outputs, found = [], []
    for size in (None, segment_tokens):
        config = make_config(segment_tokens=size)
        module = make_model(target, config, torch.float64, **kernels)
        outputs.append(module(*step_arguments(PEagleDraft(config), target, documents, GAPS)))
        outputs[-1].loss.backward()
        found.append(gradients(module))
    torch.testing.assert_close(outputs[1].loss, outputs[0].loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(outputs[1].sums, outputs[0].sums, rtol=1e-12, atol=0)
    assert all(torch.equal(outputs[1].counts[n], v) for n, v in outputs[0].counts.items())
    assert_gradients(found[1], found[0], 1e-11)


def test_evaluation_drops_no_guess_and_counts_the_rounds_of_the_proposer():
    target, config = make_target(rope=LLAMA3), make_config(retention=0.3, least_retention=0.0)
    documents = random_documents(target, [40, 12], seed=4)
    assert_rounds_are_counted(PEagleDraft(config), make_model(target, config), target, documents, 4)
