"""A draft's step with the Triton kernels is the step without them."""

import os

import pytest
import torch

from spec_backend_cpu.kernels import KERNELS as CPU_KERNELS
from spec_draft_dflash.draft import DFlashDraft
from spec_draft_eagle3.config import Eagle3Config
from spec_draft_eagle3.draft import Eagle3Draft
from spec_kit.layers.target_ops import TargetOps

from ..draft_batches import random_documents, step_arguments
from ..draft_dflash import cases as dflash
from ..draft_eagle3 import cases as eagle3
from ..draft_parts import make_target, make_tensors

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not torch.cuda.is_available() and not INTERPRETED:
    pytest.skip("no CUDA device", allow_module_level=True)

from spec_backend_cuda.attention import KERNELS as ATTENTION  # noqa: E402 (needs triton)
from spec_backend_cuda.kernels import KERNELS as TRITON  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")]
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
LENGTHS = [20, 3, 31]


def kernel(name):
    """The backend's; in the interpreter with the CPU's causal attention."""
    return (TRITON | attention()).get(name)


def plain_kernel(name):
    """The causal attention alone, so that a step differs by the Triton kernels."""
    return attention().get(name)


def attention():
    return dict(CPU_KERNELS if INTERPRETED else ATTENTION)


def step_of(module, arguments):
    """Loss, metrics and gradients of one step in float32 on DEVICE."""
    target, tensors, batch, counts = arguments
    module = module.to(DEVICE)
    module.zero_grad()
    ops = TargetOps(target, tensors, DEVICE, torch.float32)
    output = module(batch.to(DEVICE), counts.to(DEVICE), ops)
    output.loss.backward()
    sums = {name: value.detach().clone() for name, value in output.sums.items()}
    return {"loss": output.loss.detach(), **sums}, {name: p.grad for name, p in module.named_parameters()}


def assert_same_step(draft, weights, arguments):
    """``weights``: a module of the draft's own, of which only the weights are used."""
    target, tensors, *_ = arguments
    plain, fast = (draft.build(target, tensors, None, find) for find in (plain_kernel, kernel))
    for module in (plain, fast):
        module.load_state_dict(weights.state_dict())
    expected, expected_grads = step_of(plain, arguments)
    expected_grads = {name: grad.clone() for name, grad in expected_grads.items()}
    got, grads = step_of(fast, arguments)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(grads, expected_grads, rtol=1e-3, atol=1e-5)
    assert all(grad.abs().max() > 0 for grad in grads.values())


@pytest.mark.parametrize("loss", ["ce", "lk_alpha", "lk_lambda"])
@pytest.mark.parametrize("vocab_size", [None, 11])
def test_eagle3(loss, vocab_size):
    target, config = make_target(head_dim=32), Eagle3Config(num_steps=3, loss=loss, vocab_size=vocab_size)
    documents = random_documents(target, LENGTHS, seed=7)
    batch, counts, _ = step_arguments(Eagle3Draft(config), target, documents, [0, 2, 0])
    arguments = target, make_tensors(target), batch, counts
    assert_same_step(Eagle3Draft(config), eagle3.make_model(target, config), arguments)


@pytest.mark.parametrize("loss", ["ce", "dpace", "soft"])
def test_dflash(loss):
    target, config = make_target(head_dim=32), dflash.make_config(num_anchors=8, loss=loss)
    documents = random_documents(target, LENGTHS, 7, 6)
    batch, counts, _ = step_arguments(DFlashDraft(config), target, documents, [0, 2, 0])
    arguments = target, make_tensors(target), batch, counts
    assert_same_step(DFlashDraft(config), dflash.make_model(target, config), arguments)
