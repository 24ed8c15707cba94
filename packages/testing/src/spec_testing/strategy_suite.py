"""StrategySuite tests the contract of spec_core.strategy (S1-S12) with a toy module, in processes.

::

    class TestMyStrategy(StrategySuite):
        @pytest.fixture
        def strategy(self) -> type[Strategy]:
            return MyStrategy

Training runs in child processes, so that no process group stays in the test process. The reference is a plain
loop in float64 with the same optimizer (``toy_training``).
"""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load

from spec_core import Backend, DataParallel, Optimizer, StepConfig, Strategy, StrategyConfig
from spec_kit.sharding import SafetensorsFolder
from spec_testing.conformance import ConformanceSuite, import_without_torch, sources
from spec_testing.reference import reference_backend
from spec_testing.toy_optimizers import ToyOptimizer
from spec_testing.toy_plan import CLIP, Plan
from spec_testing.toy_target import toy_target
from spec_testing.toy_training import (
    HINTS,
    TOLERANCE,
    ToyDraft,
    assert_close,
    assert_gathered,
    compare_vocabulary_ops,
    evaluate_then_step,
    load_into_another_module,
    on_ranks,
    reference,
    train_all,
)

_FAR_BELOW_BFLOAT16 = torch.finfo(torch.bfloat16).eps / 64
"""Largest change of a weight near 1 in the test of S2: far below the resolution of bfloat16."""
_COLLECTIVES = {
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "broadcast",
    "broadcast_object_list", "barrier", "gather_object", "reduce_scatter", "reduce_scatter_tensor",
}  # fmt: skip


class StrategySuite(ConformanceSuite):
    """Tests of a strategy.

    A subclass must define the fixture ``strategy``, which returns the plugin's class.
    """

    backend: ClassVar[type[Backend] | None] = None
    """Backend whose devices and ``dist_backend`` the suite uses; by default the reference backend."""
    options: ClassVar[dict[str, object]] = {}
    """Values of section ``strategy`` that the suite runs with; by default the strategy's own defaults."""
    optimizer: ClassVar[type[Optimizer]] = ToyOptimizer
    """Optimizer that the strategy trains with. The default uses everything that a strategy must provide."""
    optimizer_options: ClassVar[dict[str, object]] = {}
    """Values of section ``optimizer``."""

    @pytest.fixture
    def strategy(self) -> type[Strategy]:
        """Return the strategy's class; a suite's subclass overrides this."""
        raise pytest.UsageError("a StrategySuite needs a fixture 'strategy' that returns the plugin's class")

    @pytest.fixture
    def plan(self, strategy: type[Strategy], tmp_path: Path) -> Plan:
        """Return the Plan: the options with which each rank of a test trains."""
        return Plan(
            strategy,
            self.optimizer,
            self.backend or type(reference_backend()),
            tmp_path,
            options=self.options,
            optimizer_options=self.optimizer_options,
        )

    def test_imports_without_torch(self, strategy: type[Strategy]) -> None:
        """The entry-point module imports without torch, and Config derives from StrategyConfig."""
        import_without_torch(strategy)
        assert issubclass(strategy.Config, StrategyConfig)

    def test_s11_what_changes_speed_only_are_options(self, strategy: type[Strategy]) -> None:
        """S11: ``speed_only`` contains only names of options."""
        assert strategy.Config.speed_only <= strategy.Config.model_fields.keys() - {"name"}

    def test_s1_equals_a_plain_loop(self, plan: Plan) -> None:
        """S1, S12: steps equal a plain loop: micro-batches, summed gradients, clipping by norm, optimizer."""
        clipped = replace(plan, micro_batches=2)
        free = replace(clipped, settings=StepConfig(clip=1e6))
        expected = [reference(plan) for plan in (clipped, free)]
        assert min(expected[0].grad_norms) > CLIP
        (reports,) = train_all(1, clipped, free)
        for report, wanted in zip(reports, expected, strict=True):
            assert_close(report, wanted)

    def test_s2_masters_are_float32(self, plan: Plan) -> None:
        """S2, S9: with bfloat16 compute, updates below bfloat16's resolution add up; weights are float32."""
        bf16 = replace(plan, settings=StepConfig(dtype="bfloat16", clip=1e6), lr=1e-6)
        ((report,),) = train_all(1, bf16)
        assert report.metrics[0]["itemsize"] == torch.bfloat16.itemsize
        weights = load(report.weights)
        for name, start in ToyDraft(plan.seed).named_parameters():
            assert weights[name].dtype == torch.float32
            assert 0 < (weights[name] - start).abs().max() < _FAR_BELOW_BFLOAT16
        assert_gathered(report)

    def test_s3_outputs_are_equal_on_every_rank(self, plan: Plan) -> None:
        """S3, S9: loss, sums, counts and gradient norm are summed over the step, and equal on all ranks.

        The weights that ``gather_weights`` yields, and their order, are equal on all ranks, too.
        """
        (first,), (second,) = train_all(2, replace(plan, micro_batches=2))
        assert first == second
        assert_gathered(first)

    @pytest.mark.parametrize("world_size", [1, 2])
    def test_s4_cut_and_ranks_change_rounding_only(self, plan: Plan, world_size: int) -> None:
        """S4, S12: the weights are the same, up to rounding, with any number of ranks and micro-batches.

        Micro-batches may be empty.
        """
        expected = reference(plan)
        for reports in train_all(world_size, *(replace(plan, micro_batches=cuts) for cuts in (1, 3, 5))):
            for report in reports:
                assert_close(report, expected)

    @pytest.mark.parametrize("world_size", [1, 2])
    def test_s5_resumes_to_the_bit(self, plan: Plan, world_size: int) -> None:
        """S5, S12: after loading into a fresh strategy with other weights, the next step is bitwise the same.

        Buffers and each process's random generator are restored, too.
        """
        saved = plan.folder / "saved"
        saving = replace(plan, save_to=saved)
        for went_on, resumed in train_all(
            world_size, saving, replace(plan, steps=1, seed=5, resume_from=saved)
        ):
            assert resumed.losses[-1] == went_on.losses[-1]
            assert resumed.weights == went_on.weights
            assert resumed.drawn == went_on.drawn
            assert load(resumed.weights).keys() == ToyDraft(0).state_dict().keys()

    def test_s5_loads_at_another_world_size(self, plan: Plan) -> None:
        """S5, S12: if one rank loads the state of two, weights are equal bit for bit, steps up to rounding."""
        saved = plan.folder / "saved"
        ((went_on,), _) = train_all(2, replace(plan, save_to=saved))
        ((resumed,),) = train_all(1, replace(plan, steps=1, seed=5, resume_from=saved))
        assert resumed.loaded == went_on.loaded
        assert_close(resumed, went_on)

    def test_s5_another_module_is_refused(self, plan: Plan) -> None:
        """S5: loading a state with missing or additional tensors raises ArtifactError."""
        assert on_ranks(load_into_another_module, 1, [replace(plan, save_to=plan.folder / "saved")]) == [
            [True]
        ]

    def test_s7_data_parallel_is_a_pure_function(self, plan: Plan) -> None:
        """S7: every data-parallel rank has a process, and the size is the same for all."""
        for world_size in (2, 4):
            places = [
                plan.strategy.data_parallel(plan.config, rank, world_size) for rank in range(world_size)
            ]
            assert {place.rank for place in places} == set(range(places[0].size))
            assert {place.size for place in places} == {places[0].size}

    def test_s7_a_division_makes_one_data_parallel_rank_of_all_processes(
        self, strategy: type[Strategy]
    ) -> None:
        """S7: all ranks that hold parts of one draft, as with tensor parallelism, train the same samples."""
        for ranks in (2, 4):
            for config in strategy.divisions(ranks):
                assert {strategy.data_parallel(config, rank, ranks) for rank in range(ranks)} == {
                    DataParallel(rank=0, size=1)
                }

    def test_s8_weights_are_read_without_a_group(self, plan: Plan) -> None:
        """S8: one process reads the full weights that two processes saved."""
        saved = plan.folder / "saved"
        ((report,), _) = train_all(2, replace(plan, save_to=saved))
        read = plan.strategy.read_weights(SafetensorsFolder(saved))
        expected = load(report.loaded)
        assert read.keys() == expected.keys()
        assert all(torch.equal(read[name], value) for name, value in expected.items())

    def test_s6_names_the_group_of_every_collective(self, strategy: type[Strategy]) -> None:
        """S6: every collective call in the plugin's source has a group argument."""
        calls = [f"{file.name}:{line}" for file, tree in sources(strategy) for line in _ungrouped(tree)]
        assert not calls, f"collectives without a group in {', '.join(calls)}"

    def test_s10_accepts_what_it_trains(self, plan: Plan, tmp_path: Path) -> None:
        """S10: ``check`` needs no group, and accepts the target and the draft that this suite trains."""
        plan.strategy.check(plan.config, toy_target(tmp_path), HINTS)

    def test_evaluate_changes_nothing(self, plan: Plan) -> None:
        """``evaluate`` returns the output that the next step would return, and changes no weight."""
        for ((evaluated, stepped, unchanged),) in on_ranks(evaluate_then_step, 2, [plan]):
            assert evaluated == pytest.approx(stepped, rel=TOLERANCE)
            assert unchanged

    def test_vocabulary_ops_are_the_targets(self, plan: Plan) -> None:
        """O1–O3: embeddings and teacher logits equal the target's, without a gradient."""
        assert on_ranks(compare_vocabulary_ops, 1, [plan]) == [[True]]


def _ungrouped(tree: ast.Module) -> list[int]:
    """Return the lines that call a collective of torch.distributed without a group."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in _COLLECTIVES
        and ast.unparse(node.func.value) in {"dist", "torch.distributed"}
        and not {keyword.arg for keyword in node.keywords} & {"group", "process_group"}
    ]
