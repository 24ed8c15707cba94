"""A process that trains alone computes what FSDP2 computes on one rank."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from spec_core.records import ShardHints, StepOutput
from spec_strategy_fsdp import whole_module
from spec_strategy_fsdp.sharded_module import ShardedModule
from spec_strategy_fsdp.whole_module import WholeModule


class Draft(nn.Module):
    """Two layers with a used and a frozen weight; its batch is its input."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(6, 8), nn.Linear(8, 1)
        self.outer.bias.requires_grad_(False)

    def forward(self, batch, denominators, ops):
        result = self.outer(torch.tanh(self.inner(batch.to(self.outer.weight.dtype))))
        return StepOutput(loss=result.float().square().sum() / denominators, sums={}, counts={})


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def full(tensor):
    return getattr(tensor, "full_tensor", lambda: tensor)()


def trained(draft, steps=2):
    """Return losses, and the weights after some steps of two micro-batches each."""
    optimizer = torch.optim.SGD(draft.trained.values(), 0.1)
    batches = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(steps):
        draft.begin()
        for index, batch in enumerate(batches):
            loss = draft.forward(batch, 3, None, reduces=index == 1).loss
            loss.backward()
            draft.end_pass()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: full(value) for name, value in draft.state_dict().items()}


@pytest.mark.parametrize("large_bytes", [0, 1 << 30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_fsdp_on_one_rank_to_the_bit(one_rank, monkeypatch, dtype, large_bytes):
    monkeypatch.setattr(whole_module, "LARGE_BYTES", large_bytes)
    losses, weights = trained(WholeModule(Draft(), dtype))
    expected_losses, expected = trained(ShardedModule(Draft(), ShardHints(blocks=("inner",)), 1, dtype))
    assert losses == expected_losses
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
    assert {value.dtype for value in weights.values()} == {torch.float32}


def test_evaluates_the_weights_after_a_step(monkeypatch):
    monkeypatch.setattr(whole_module, "LARGE_BYTES", 0)
    module = Draft()
    draft = WholeModule(module, torch.bfloat16)
    _, weights = trained(draft, steps=1)
    draft.begin()
    assert torch.equal(module.inner.weight, weights["inner.weight"].bfloat16())
