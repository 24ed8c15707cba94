"""Train a toy module by a strategy in real processes, and by a plain loop, for StrategySuite.

The reference is a float64 loop over the whole global batch on one device, with the same optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.nn import functional as F

from spec_core import Strategy, TrainedWeight, VocabularyOps, map_here
from spec_core.errors import ArtifactError
from spec_core.records import DraftBatch, FeatureSchema, ShardHints, StepOutput
from spec_kit.sharding import SafetensorsFolder
from spec_testing.limits import patient
from spec_testing.processes import Rank, run_ranks
from spec_testing.toy_plan import Plan, Report
from spec_testing.toy_target import ToySample, toy_batch, toy_target, toy_tensors

LIMIT_S = patient(90.0)
SCHEMA = FeatureSchema(layers=(1,), hidden_size=8, dtype="float32")
LENGTHS = (6, 1, 9, 4, 3, 8)
HINTS = ShardHints(blocks=("block",), vocabulary=("out",))
TOLERANCE = 2e-5


class ToyDraft(nn.Module):
    """A toy module that predicts from a token's features whether its id is odd, with a squared error."""

    def __init__(self, seed: int) -> None:
        """Draw the weights from ``seed``."""
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.block = nn.Linear(SCHEMA.hidden_size, 5)
        self.out = nn.Linear(5, 1)
        self.register_buffer("mapping", torch.randint(9, (4,), generator=generator))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, batch: DraftBatch, denominators: Tensor, ops: VocabularyOps | None) -> StepOutput:
        """Return the batch's loss and metrics, divided by the global batch's ``denominators``."""
        dtype = self.out.weight.dtype  # the root's: a block's weights are gathered in its own forward only
        guess_T = self.out(torch.tanh(self.block(batch.hidden_TNH[:, 0].to(dtype)))).squeeze(-1)
        # From here on float64 if the parameters are, as in the reference loop, else float32.
        error_T = (guess_T.to(torch.promote_types(dtype, torch.float32)) - batch.input_ids_T % 2) ** 2
        mask_T = batch.loss_mask_T.to(error_T.device)
        error = (error_T * mask_T).sum()
        count = mask_T.sum()
        return StepOutput(
            loss=error / denominators[0].to(error.device, error.dtype).clamp(min=1),
            sums={"error": error.detach(), "itemsize": count * dtype.itemsize},
            counts={"error": count, "itemsize": count},
        )


def train_all(world_size: int, *plans: Plan) -> list[list[Report]]:
    """Train each plan on every rank; return the reports as [rank][plan]."""
    return on_ranks(train_toy, world_size, plans)


def on_ranks(act: Callable[[Strategy, Plan], Any], world_size: int, plans: Sequence[Plan]) -> list[list[Any]]:
    """Call ``act`` with a strategy and each plan on each rank; return the results as [rank][plan]."""
    return run_ranks(_rank, world_size, act, plans, f"group-{uuid4().hex}", timeout_s=LIMIT_S)


def _rank(me: Rank, act: Callable[[Strategy, Plan], Any], plans: Sequence[Plan], group: str) -> list[Any]:
    """Call ``act`` on each plan with a new strategy, in one rank's process, within torch's default group."""
    plugin = plans[0].backend
    backend = plugin(plugin.Config(name=plugin.name))
    device = backend.device(me.rank)
    torch.distributed.init_process_group(
        backend.dist_backend, f"file://{plans[0].folder / group}", rank=me.rank, world_size=me.world_size
    )
    results: list[Any] = []
    for plan in plans:
        with plan.new_strategy(device) as strategy:
            strategy.attach(ToyDraft(plan.seed), HINTS)
            results.append(act(strategy, plan))
        strategy.close()  # a second time, because ``close`` must be idempotent
    torch.distributed.destroy_process_group()
    return results


def train_toy(strategy: Strategy, plan: Plan) -> Report:
    """Train a plan from start to end; return this rank's Report."""
    report = Report()
    if plan.resume_from is not None:
        strategy.load(SafetensorsFolder(plan.resume_from))
        report.loaded = save(strategy.full_weights())
        report.drawn = torch.rand(3).tolist()
    for _ in range(plan.steps):
        _step(strategy, plan, report)
    if plan.save_to is not None:
        plan.save_to.mkdir(exist_ok=True)
        torch.manual_seed(torch.distributed.get_rank())
        strategy.save(SafetensorsFolder(plan.save_to))
        report.drawn = torch.rand(3).tolist()
        report.loaded = save(strategy.full_weights())
        _step(strategy, plan, report)
    report.weights = save(strategy.full_weights())
    report.gathered = [(name, _alone(tensor)) for name, tensor in strategy.gather_weights()]
    return report


def _alone(tensor: Tensor) -> bytes:
    return save({"tensor": tensor.contiguous()})


def _step(strategy: Strategy, plan: Plan, report: Report) -> None:
    batches, denominators = _toy_share(strategy, plan.micro_batches)
    done = strategy.step(batches, denominators, _ops(strategy, plan), plan.lr)
    report.losses.append(done.output.loss.item())
    report.metrics.append(done.output.metrics())
    report.grad_norms.append(done.grad_norm.item())


def evaluate_then_step(strategy: Strategy, plan: Plan) -> tuple[float, float, bool]:
    """Return the loss of ``evaluate``, the next step's loss, and whether ``evaluate`` changed no weight."""
    before = save(strategy.full_weights())
    batches, denominators = _toy_share(strategy, 2)
    evaluated = strategy.evaluate(batches, denominators, _ops(strategy, plan))
    after = save(strategy.full_weights())
    done = strategy.step(batches, denominators, _ops(strategy, plan), plan.lr)
    return evaluated.loss.item(), done.output.loss.item(), before == after


def load_into_another_module(strategy: Strategy, plan: Plan) -> bool:
    """Return whether loading a saved state into a module with one more parameter is refused."""
    assert plan.save_to is not None
    plan.save_to.mkdir(exist_ok=True)
    strategy.save(SafetensorsFolder(plan.save_to))
    module = ToyDraft(plan.seed)
    module.more = nn.Linear(2, 2)
    with plan.new_strategy(strategy.device) as other:
        other.attach(module, HINTS)
        try:
            other.load(SafetensorsFolder(plan.save_to))
        except ArtifactError:
            return True
    return False


def compare_vocabulary_ops(strategy: Strategy, plan: Plan) -> bool:
    """Assert that VocabularyOps give the embeddings and logits of the target's tensors; return True."""
    ops = _ops(strategy, plan)
    device = strategy.device
    target = toy_target(plan.folder)
    tensors = toy_tensors(target)
    ids = torch.tensor([3, 96, 0], device=device)
    assert torch.equal(ops.embed(ids).cpu(), tensors.embedding_VH[ids.cpu()])
    hidden_RH = torch.randn(4, target.hidden_size, generator=torch.Generator().manual_seed(0))
    normed = F.rms_norm(hidden_RH, (target.hidden_size,), tensors.norm_H, target.norm_eps)
    first, stop = ops.vocab_range
    logits = ops.teacher_logits(hidden_RH.to(device).requires_grad_())
    assert not logits.requires_grad
    torch.testing.assert_close(logits.cpu(), (normed @ tensors.head_VH.T)[:, first:stop])
    # One process has the whole vocabulary, so the reductions return their arguments.
    assert torch.equal(ops.reduce_max(logits[:, 0]), logits[:, 0])
    assert torch.equal(ops.reduce_sum(logits[:, 0]), logits[:, 0])
    return True


def _ops(strategy: Strategy, plan: Plan) -> VocabularyOps:
    target = toy_target(plan.folder)
    return strategy.vocabulary_ops(target, toy_tensors(target))


def _samples() -> list[ToySample]:
    generator = torch.Generator().manual_seed(3)
    return [
        ToySample(
            sample_id,
            torch.randint(50, (length,), generator=generator),
            torch.randn(SCHEMA.shape(length), generator=generator),
            torch.rand(length, generator=generator) < 0.8,
        )
        for sample_id, length in enumerate(LENGTHS)
    ]


def _toy_share(strategy: Strategy, micro_batches: int) -> tuple[list[DraftBatch], Tensor]:
    """Return this rank's share of the global batch, as ``micro_batches`` batches, and the denominators.

    Each of N data-parallel ranks gets every N-th sample.
    """
    place = strategy.data_parallel(
        strategy.config, torch.distributed.get_rank(), torch.distributed.get_world_size()
    )
    cuts = [_samples()[place.rank :: place.size][index::micro_batches] for index in range(micro_batches)]
    return [toy_batch(cut, SCHEMA, width=2).to(strategy.device) for cut in cuts], _denominators()


def _denominators() -> Tensor:
    return torch.stack([sample.loss_mask.sum() for sample in _samples()]).sum(0, keepdim=True).double()


def reference(plan: Plan) -> Report:
    """Train a plan by a plain loop in float64, with one batch, one device and full weights."""
    module = ToyDraft(plan.seed).double()
    weights = [
        TrainedWeight(
            name=name, values=value, shape=tuple(value.shape), is_vocabulary=HINTS.is_vocabulary(name)
        )
        for name, value in module.named_parameters()
    ]
    optimizer = plan.new_optimizer().build(weights, map_here)
    for group in optimizer.param_groups:
        group["lr"] = plan.lr
    batch = toy_batch(_samples(), SCHEMA)
    denominators = _denominators()
    report = Report()
    for _ in range(plan.steps):
        optimizer.zero_grad()
        output: StepOutput = module(batch, denominators, None)
        output.loss.backward()
        norm = nn.utils.clip_grad_norm_(module.parameters(), plan.settings.clip)
        optimizer.step()
        report.losses.append(output.loss.item())
        report.metrics.append(output.metrics())
        report.grad_norms.append(norm.item())
    report.weights = save(module.state_dict())
    return report


def assert_close(got: Report, expected: Report) -> None:
    """Assert that two reports differ by rounding only."""
    last = len(got.losses)
    assert got.losses == pytest.approx(expected.losses[-last:], rel=TOLERANCE)
    assert got.grad_norms == pytest.approx(expected.grad_norms[-last:], rel=TOLERANCE)
    for mine, theirs in zip(got.metrics, expected.metrics[-last:], strict=True):
        assert mine["error"] == pytest.approx(theirs["error"], rel=TOLERANCE)
    weights = load(got.weights)
    for name, value in load(expected.weights).items():
        torch.testing.assert_close(weights[name].to(value.dtype), value, rtol=TOLERANCE, atol=TOLERANCE)


def assert_gathered(report: Report) -> None:
    """Assert that ``gather_weights`` yielded each tensor of ``full_weights`` once, bit for bit."""
    assert len(report.gathered) == len(dict(report.gathered))
    assert dict(report.gathered) == {name: _alone(tensor) for name, tensor in load(report.weights).items()}
