"""StrategySuite: the contract of spec_core.strategy (S1–S6) as tests, with a toy module and real processes.

::

    class TestMyStrategy(StrategySuite):
        @pytest.fixture
        def strategy(self) -> type[Strategy]:
            return MyStrategy

Everything runs in processes of its own, so that the test process keeps no group. The reference is a plain float64
loop over the whole global batch.
"""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from uuid import uuid4

import pytest
import torch
from safetensors.torch import load, save
from torch import nn
from torch.nn import functional as F

from spec_core.cpu.backend import CpuBackend
from spec_core.records import FeatureSchema, ShardHints, StepOutput
from spec_core.strategy import OptimizerConfig, Strategy
from spec_core.testing.conformance import ConformanceSuite, run_python, sources
from spec_core.testing.processes import run_ranks
from spec_core.testing.toy_target import ToySample, toy_batch, toy_target, toy_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from spec_core.backend import Backend
    from spec_core.ops import VocabularyOps
    from spec_core.records import DraftBatch
    from spec_core.testing.processes import Rank

LIMIT_S = 90.0
SCHEMA = FeatureSchema(layers=(1,), hidden_size=8, dtype="float32")
LENGTHS = (6, 1, 9, 4, 3, 8)
OPTIMIZER = {"eps": 1e-4, "clip": 0.05}
"""A large eps: next to a zero gradient AdamW would turn rounding into whole steps. A small clip: it acts."""
LR = 0.01
TOLERANCE = 2e-5

_COLLECTIVES = {
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "broadcast",
    "broadcast_object_list", "barrier", "reduce_scatter", "reduce_scatter_tensor", "save", "load",
}  # fmt: skip


class ToyDraft(nn.Module):
    """Tells odd tokens from even ones by their features: two layers, one buffer, shares of a squared error."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.block = nn.Linear(SCHEMA.hidden_size, 5)
        self.out = nn.Linear(5, 1)
        self.register_buffer("mapping", torch.randint(9, (4,), generator=generator))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, batch: DraftBatch, denominators: Tensor, ops: VocabularyOps | None) -> StepOutput:
        dtype = self.out.weight.dtype  # the root's: a block of its own is gathered inside its forward only
        guess_T = self.out(torch.tanh(self.block(batch.hidden_TNH[:, 0].to(dtype)))).squeeze(-1)
        # Float64 from here on where the parameters are: the reference loop runs in it.
        error_T = (guess_T.to(torch.promote_types(dtype, torch.float32)) - batch.input_ids_T % 2) ** 2
        error = (error_T * batch.loss_mask_T).sum()
        count = batch.loss_mask_T.sum()
        return StepOutput(
            loss=error / denominators[0].to(error.device, error.dtype).clamp(min=1),
            sums={"error": error.detach(), "itemsize": count * dtype.itemsize},
            counts={"error": count, "itemsize": count},
        )


@dataclass(frozen=True)
class Plan:
    """What one rank does. ``cut`` says how the global batch is partitioned."""

    strategy: type[Strategy]
    backend: type[Backend]
    folder: Path
    steps: int = 4
    micro_batches: int = 1
    seed: int = 0
    lr: float = LR
    optimizer: dict[str, object] = field(default_factory=lambda: dict(OPTIMIZER))
    resume_from: Path | None = None
    save_to: Path | None = None
    """A checkpoint written after ``steps``; one more step follows."""


@dataclass
class Report:
    """What one rank saw."""

    losses: list[float] = field(default_factory=list[float])
    metrics: list[dict[str, float | list[float]]] = field(
        default_factory=list[dict[str, float | list[float]]]
    )
    grad_norms: list[float] = field(default_factory=list[float])
    loaded: bytes = b""
    weights: bytes = b""
    """Safetensors: a tensor of a rank that has ended could not be read."""


class StrategySuite(ConformanceSuite):
    """Needs the fixture ``strategy``: the plugin's class."""

    backend: ClassVar[type[Backend]] = CpuBackend
    """Where the suite runs: its devices and its ``dist_backend``."""

    @pytest.fixture
    def strategy(self) -> type[Strategy]:
        raise pytest.UsageError("a StrategySuite needs a fixture 'strategy' that returns the plugin's class")

    @pytest.fixture
    def plan(self, strategy: type[Strategy], tmp_path: Path) -> Plan:
        return Plan(strategy, self.backend, tmp_path)

    def test_imports_without_torch(self, strategy: type[Strategy]) -> None:
        """The entry-point module imports without torch, and Config derives from OptimizerConfig."""
        run_python(f"import importlib; importlib.import_module({strategy.__module__!r})", blocked=["torch"])
        assert issubclass(strategy.Config, OptimizerConfig)

    def test_s1_equals_a_plain_loop(self, plan: Plan) -> None:
        """S1: forward and backward once per micro-batch, summed gradients, clipped by the global norm, AdamW."""
        clipped = replace(plan, micro_batches=2)
        free = replace(clipped, optimizer={**OPTIMIZER, "clip": 1e6})
        expected = [_reference(clipped), _reference(free)]
        assert min(expected[0].grad_norms) > OPTIMIZER["clip"]
        (reports,) = _run(1, clipped, free)
        for report, reference in zip(reports, expected, strict=True):
            _assert_close(report, reference)

    def test_s2_masters_are_float32(self, plan: Plan) -> None:
        """S2: computing in bfloat16, updates far below bfloat16's resolution still add up; weights come as
        float32."""
        bf16 = replace(plan, optimizer={**OPTIMIZER, "dtype": "bfloat16"}, lr=1e-6)
        ((report,),) = _run(1, bf16)
        assert report.metrics[0]["itemsize"] == torch.bfloat16.itemsize
        weights = load(report.weights)
        for name, start in ToyDraft(plan.seed).named_parameters():
            assert weights[name].dtype == torch.float32
            assert 0 < (weights[name] - start).abs().max() < 1e-5

    def test_s3_outputs_are_equal_on_every_rank(self, plan: Plan) -> None:
        """S3: loss, sums, counts and the gradient norm are those of the whole step, the same on all ranks."""
        (first,), (second,) = _run(2, replace(plan, micro_batches=2))
        assert first == second

    @pytest.mark.parametrize("world_size", [1, 2])
    def test_s4_cut_and_ranks_change_rounding_only(self, plan: Plan, world_size: int) -> None:
        """S4: any number of ranks and micro-batches, empty ones among them, trains the same weights."""
        expected = _reference(plan)
        for reports in _run(world_size, *(replace(plan, micro_batches=cuts) for cuts in (1, 3, 5))):
            for report in reports:
                _assert_close(report, expected)

    @pytest.mark.parametrize("world_size", [1, 2])
    def test_s5_resumes_to_the_bit(self, plan: Plan, world_size: int) -> None:
        """S5: saved by torch.distributed.checkpoint and loaded into a fresh strategy with other weights, the next
        step gives the same bits; buffers come along."""
        saved = plan.folder / "saved"
        saving = replace(plan, save_to=saved)
        for went_on, resumed in _run(world_size, saving, replace(plan, steps=1, seed=5, resume_from=saved)):
            assert resumed.losses[-1] == went_on.losses[-1]
            assert resumed.weights == went_on.weights
            assert load(resumed.weights).keys() == ToyDraft(0).state_dict().keys()

    def test_s5_loads_at_another_world_size(self, plan: Plan) -> None:
        """S5: what two ranks saved, one loads: the same bits before the next step, the same step after it."""
        saved = plan.folder / "saved"
        ((went_on,), _) = _run(2, replace(plan, save_to=saved))
        ((resumed,),) = _run(1, replace(plan, steps=1, seed=5, resume_from=saved))
        assert resumed.loaded == went_on.loaded
        _assert_close(resumed, went_on)

    def test_s6_names_the_group_of_every_collective(self, strategy: type[Strategy]) -> None:
        """S6: in the plugin's source no collective, and no checkpoint call, leaves its group out."""
        spec = importlib.util.find_spec(strategy.__module__)
        assert spec is not None
        calls = [
            f"{file.name}:{line}"
            for file, tree in sources(strategy)
            if str(file) == spec.origin
            for line in _ungrouped(tree)
        ]
        assert not calls, f"collectives without a group in {', '.join(calls)}"

    def test_evaluate_changes_nothing(self, plan: Plan) -> None:
        """``evaluate`` gives the output of the step that would follow, and trains nothing."""
        for ((evaluated, stepped, unchanged),) in _spawn(_evaluate_then_step, 2, [plan]):
            assert evaluated == pytest.approx(stepped, rel=TOLERANCE)
            assert unchanged

    def test_vocabulary_ops_are_the_targets(self, plan: Plan) -> None:
        """O1–O3: embedding rows as stored, teacher logits of final norm and head, without a gradient."""
        assert _spawn(_compare_vocabulary_ops, 1, [plan]) == [[True]]


def _run(world_size: int, *plans: Plan) -> list[list[Report]]:
    """[rank][plan]"""
    return _spawn(_train, world_size, plans)


def _spawn(act: Callable[[Strategy, Plan], Any], world_size: int, plans: Sequence[Plan]) -> list[list[Any]]:
    return run_ranks(_rank, world_size, act, plans, f"group-{uuid4().hex}", timeout_s=LIMIT_S)


def _rank(me: Rank, act: Callable[[Strategy, Plan], Any], plans: Sequence[Plan], group: str) -> list[Any]:
    """One rank's process: plan after plan, each with a strategy of its own, in torch's default group."""
    plugin = plans[0].backend
    backend = plugin(plugin.Config(name=plugin.name))
    device = backend.device(me.rank)
    torch.distributed.init_process_group(
        backend.dist_backend, f"file://{plans[0].folder / group}", rank=me.rank, world_size=me.world_size
    )
    results: list[Any] = []
    for plan in plans:
        config = plan.strategy.Config.model_validate(plan.optimizer)
        with plan.strategy(config, device) as strategy:
            strategy.attach(ToyDraft(plan.seed), ShardHints(blocks=("block",)))
            results.append(act(strategy, plan))
        strategy.close()  # once more: idempotent
    torch.distributed.destroy_process_group()
    return results


def _train(strategy: Strategy, plan: Plan) -> Report:
    report = Report()
    if plan.resume_from is not None:
        _load(strategy, plan.resume_from)
        report.loaded = save(strategy.full_weights())
    for _ in range(plan.steps):
        _step(strategy, plan, report)
    if plan.save_to is not None:
        _save(strategy, plan.save_to)
        report.loaded = save(strategy.full_weights())
        _step(strategy, plan, report)
    report.weights = save(strategy.full_weights())
    return report


def _step(strategy: Strategy, plan: Plan, report: Report) -> None:
    batches, denominators = _share(strategy, plan.micro_batches)
    done = strategy.step(batches, denominators, _ops(strategy), plan.lr)
    report.losses.append(done.output.loss.item())
    report.metrics.append(done.output.metrics())
    report.grad_norms.append(done.grad_norm.item())


def _save(strategy: Strategy, folder: Path) -> None:
    from torch.distributed.checkpoint import state_dict_saver

    state_dict_saver.save(
        strategy.state_dict(), checkpoint_id=folder, process_group=torch.distributed.group.WORLD
    )


def _load(strategy: Strategy, folder: Path) -> None:
    from torch.distributed.checkpoint import state_dict_loader

    state = strategy.state_dict()
    state_dict_loader.load(state, checkpoint_id=folder, process_group=torch.distributed.group.WORLD)
    strategy.load_state_dict(state)


def _evaluate_then_step(strategy: Strategy, plan: Plan) -> tuple[float, float, bool]:
    before = save(strategy.full_weights())
    batches, denominators = _share(strategy, 2)
    evaluated = strategy.evaluate(batches, denominators, _ops(strategy))
    after = save(strategy.full_weights())
    done = strategy.step(batches, denominators, _ops(strategy), plan.lr)
    return evaluated.loss.item(), done.output.loss.item(), before == after


def _compare_vocabulary_ops(strategy: Strategy, plan: Plan) -> bool:
    ops, device = _ops(strategy), strategy.device
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
    # One process holds the whole vocabulary: nothing to combine.
    assert torch.equal(ops.reduce_max(logits[:, 0]), logits[:, 0])
    assert torch.equal(ops.reduce_sum(logits[:, 0]), logits[:, 0])
    return True


def _ops(strategy: Strategy) -> VocabularyOps:
    target = toy_target(Path("target"))
    return strategy.vocabulary_ops(target, toy_tensors(target), attention=None)


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


def _share(strategy: Strategy, micro_batches: int) -> tuple[list[DraftBatch], Tensor]:
    """This rank's part of the one global batch: every ``size``-th sample, dealt to ``micro_batches``."""
    rank, size = strategy.data_parallel
    cuts = [_samples()[rank::size][index::micro_batches] for index in range(micro_batches)]
    return [_move(toy_batch(cut, SCHEMA, width=2), strategy.device) for cut in cuts], _denominators()


def _denominators() -> Tensor:
    return torch.stack([sample.loss_mask.sum() for sample in _samples()]).sum(0, keepdim=True).double()


def _move(batch: DraftBatch, device: torch.device) -> DraftBatch:
    return replace(
        batch,
        input_ids_T=batch.input_ids_T.to(device),
        hidden_TNH=batch.hidden_TNH.to(device),
        loss_mask_T=batch.loss_mask_T.to(device),
    )


def _reference(plan: Plan) -> Report:
    """The same training as a plain loop in float64: one batch, one device, torch's own AdamW."""
    module = ToyDraft(plan.seed).double()
    config = OptimizerConfig.model_validate(plan.optimizer)
    optimizer = torch.optim.AdamW(
        module.parameters(), lr=plan.lr, betas=config.betas, eps=config.eps, weight_decay=0.0
    )
    batch, denominators = toy_batch(_samples(), SCHEMA), _denominators()
    report = Report()
    for _ in range(plan.steps):
        optimizer.zero_grad()
        output: StepOutput = module(batch, denominators, None)
        output.loss.backward()
        norm = nn.utils.clip_grad_norm_(module.parameters(), config.clip)
        optimizer.step()
        report.losses.append(output.loss.item())
        report.metrics.append(output.metrics())
        report.grad_norms.append(norm.item())
    report.weights = save(module.state_dict())
    return report


def _assert_close(got: Report, expected: Report) -> None:
    last = len(got.losses)
    assert got.losses == pytest.approx(expected.losses[-last:], rel=TOLERANCE)
    assert got.grad_norms == pytest.approx(expected.grad_norms[-last:], rel=TOLERANCE)
    for mine, theirs in zip(got.metrics, expected.metrics[-last:], strict=True):
        assert mine["error"] == pytest.approx(theirs["error"], rel=TOLERANCE)
    weights = load(got.weights)
    for name, value in load(expected.weights).items():
        torch.testing.assert_close(weights[name].to(value.dtype), value, rtol=TOLERANCE, atol=TOLERANCE)


def _ungrouped(tree: ast.Module) -> list[int]:
    """Lines that call a collective of torch.distributed, or its checkpoint, without a group."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in _COLLECTIVES
        and ast.unparse(node.func.value)
        in {"dist", "dcp", "torch.distributed", "torch.distributed.checkpoint"}
        and not {keyword.arg for keyword in node.keywords} & {"group", "process_group"}
    ]
