"""OptimizerSuite tests the contract of spec_core.optimizer (G1-G7) in one process.

::

    class TestMyOptimizer(OptimizerSuite):
        @pytest.fixture
        def optimizer(self) -> type[Optimizer]:
            return MyOptimizer

Weights are divided over two ranks, each a thread. ``StrategySuite.optimizer`` tests an optimizer in real
processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from spec_core import Optimizer, OptimizerConfig, TrainedWeight, map_here
from spec_core.records import Availability
from spec_testing.conformance import ConformanceSuite, import_without_torch
from spec_testing.limits import patient

LIMIT_S = patient(60.0)
_SHAPES = {"layer.weight": (6, 4), "head.weight": (9, 4), "norm.weight": (5,)}
_VOCABULARY = "head.weight"
_STEPS = 4
_TOLERANCE = 1e-5

Cut = dict[str, tuple["Tensor", "Tensor"]]
"""Weight name -> the shards of rank 0 and rank 1."""


class OptimizerSuite(ConformanceSuite):
    """Tests of an optimizer.

    A subclass must define the fixture ``optimizer``, which returns the plugin's class.
    """

    options: ClassVar[dict[str, object]] = {}
    """Values of section ``optimizer`` that the suite runs with; by default the optimizer's own defaults."""
    lr: ClassVar[float] = 0.02
    """Learning rate that the suite trains with."""

    @pytest.fixture
    def optimizer(self) -> type[Optimizer]:
        """Return the plugin's class; a suite's subclass overrides this."""
        raise pytest.UsageError(
            "an OptimizerSuite needs a fixture 'optimizer' that returns the plugin's class"
        )

    @pytest.fixture
    def plugin(self, optimizer: type[Optimizer]) -> Optimizer:
        """Return the plugin's optimizer with the suite's options."""
        return optimizer(optimizer.Config.model_validate({"name": optimizer.name, **self.options}))

    def test_g1_imports_without_torch(self, optimizer: type[Optimizer]) -> None:
        """G1: the module imports without torch, Config derives from OptimizerConfig, ``probe`` returns."""
        import_without_torch(optimizer)
        assert issubclass(optimizer.Config, OptimizerConfig)
        assert optimizer.Config.speed_only <= optimizer.Config.model_fields.keys() - {"name"}
        assert isinstance(optimizer.probe(), Availability)

    def test_g2_holds_every_weight_once(self, plugin: Optimizer) -> None:
        """G2: the parameter groups hold exactly the given values; a step at learning rate 0 changes none."""
        weights = _weights(_drawn(0))
        built = plugin.build(weights, map_here)
        held = [id(value) for group in built.param_groups for value in group["params"]]
        assert sorted(held) == sorted(id(weight.values) for weight in weights)
        before = [weight.values.clone() for weight in weights]
        _step(built, weights, _drawn(1), lr=0.0)
        assert all(torch.equal(weight.values, value) for weight, value in zip(weights, before, strict=True))

    def test_g2_g3_follows_the_gradient(self, plugin: Optimizer) -> None:
        """G2, G3: the weights are changed in place towards a lower loss, and no weight is left out."""
        weights = _weights(_drawn(0))
        goal = _drawn(9)
        built = plugin.build(weights, map_here)
        before = {weight.name: (weight.values - goal[weight.name]).norm() for weight in weights}
        for _ in range(_STEPS):
            gradients = {weight.name: weight.values - goal[weight.name] for weight in weights}
            _step(built, weights, gradients, self.lr)
        for weight in weights:
            assert (weight.values - goal[weight.name]).norm() < before[weight.name]

    def test_g3_equal_inputs_give_equal_bits(self, plugin: Optimizer) -> None:
        """G3: equal steps from equal weights give bitwise equal weights."""
        first, second = self._trained(plugin), self._trained(plugin)
        assert all(torch.equal(first[name], second[name]) for name in first)

    @pytest.mark.parametrize("cut", ["rows", "range"])
    def test_g4_g6_parts_change_as_the_whole_does(self, plugin: Optimizer, cut: str) -> None:
        """G3, G4, G6: weights sharded by rows or element ranges change as full weights do, up to rounding.

        One rank has no element of the vector, and no gradient for it.
        """
        whole = self._trained(plugin)
        ranks = _Ranks({"rows": _cut_rows, "range": _cut_range}[cut])
        for name, value in ranks.train(plugin, self.lr).items():
            torch.testing.assert_close(value, whole[name], rtol=_TOLERANCE, atol=_TOLERANCE)

    def test_g5_state_is_there_from_the_start(self, plugin: Optimizer) -> None:
        """G5: each state tensor has the weight's shape or no dimension; steps add no further state."""
        weights = _weights(_drawn(0))
        built = plugin.build(weights, map_here)
        names = [sorted(built.state[weight.values]) for weight in weights]
        for weight in weights:
            for value in built.state[weight.values].values():
                assert value.shape in (weight.values.shape, ())
        _step(built, weights, _drawn(1), self.lr)
        assert [sorted(built.state[weight.values]) for weight in weights] == names

    def test_g7_declared_bytes_are_those_of_the_state(self, plugin: Optimizer) -> None:
        """G7: a declared ``state_bytes`` equals the bytes of the state's tensors."""
        weights = _weights(_drawn(0))
        built = plugin.build(weights, map_here)
        for weight in weights:
            kept = sum(value.nbytes for value in built.state[weight.values].values())
            assert plugin.state_bytes(weight) in (0, kept)

    def test_g5_goes_on_to_the_bit(self, plugin: Optimizer) -> None:
        """G5: a fresh optimizer that gets the weights and the state of another takes the same next step."""
        weights, again = _weights(_drawn(0)), _weights(_drawn(5))
        built, fresh = plugin.build(weights, map_here), plugin.build(again, map_here)
        for number in range(_STEPS):
            _step(built, weights, _drawn(number), self.lr)
        for old, new in zip(weights, again, strict=True):
            new.values.copy_(old.values)
            for key, value in fresh.state[new.values].items():
                value.copy_(built.state[old.values][key])
        for optimizer, of in ((built, weights), (fresh, again)):
            _step(optimizer, of, _drawn(_STEPS), self.lr)
        for old, new in zip(weights, again, strict=True):
            assert torch.equal(old.values, new.values)

    def _trained(self, plugin: Optimizer) -> dict[str, Tensor]:
        weights = _weights(_drawn(0))
        built = plugin.build(weights, map_here)
        for number in range(_STEPS):
            _step(built, weights, _drawn(number + 1), self.lr)
        return {weight.name: weight.values for weight in weights}


class _Ranks:
    """Two ranks as threads; each holds shards of the weights and can exchange them with the other rank."""

    def __init__(self, cut: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        self._cut = cut
        self._barrier = Barrier(2, timeout=LIMIT_S)
        self._parts: list[Mapping[str, Tensor]] = [{}, {}]

    def train(self, plugin: Optimizer, lr: float) -> dict[str, Tensor]:
        """Train some steps on both ranks and return the full weights."""
        with ThreadPoolExecutor(2) as threads:
            parts = list(threads.map(self._train, (plugin, plugin), (lr, lr), (0, 1)))
        return {
            name: torch.cat([part[name].flatten() for part in parts]).view(shape)
            for name, shape in _SHAPES.items()
        }

    def _train(self, plugin: Optimizer, lr: float, rank: int) -> dict[str, Tensor]:
        def parts_of(wholes: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: self._cut(value)[rank].clone() for name, value in wholes.items()}

        def map_whole(function: Callable[[Tensor], Tensor], parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
            first, second = self._exchanged(rank, parts)
            assert list(first) == list(second)  # G6
            wholes = {name: torch.cat([first[name].flatten(), second[name].flatten()]) for name in first}
            return parts_of({name: function(whole.view(_SHAPES[name])) for name, whole in wholes.items()})

        weights = _weights(parts_of(_drawn(0)))
        built = plugin.build(weights, map_whole)
        for number in range(_STEPS):
            _step(built, weights, parts_of(_drawn(number + 1)), lr)
        return {weight.name: weight.values for weight in weights}

    def _exchanged(self, rank: int, parts: Mapping[str, Tensor]) -> list[Mapping[str, Tensor]]:
        """Exchange shards with the other rank and return the shards of both ranks, in rank order."""
        self._parts[rank] = {name: part.clone() for name, part in parts.items()}
        self._barrier.wait()
        everyones = list(self._parts)
        self._barrier.wait()
        return everyones


def _drawn(seed: int) -> dict[str, Tensor]:
    """Return weight name -> random tensor, for initial weights or gradients."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in _SHAPES.items()}


def _weights(values: Mapping[str, Tensor]) -> list[TrainedWeight]:
    return [
        TrainedWeight(name=name, values=value, shape=_SHAPES[name], is_vocabulary=name == _VOCABULARY)
        for name, value in values.items()
    ]


def _step(
    built: torch.optim.Optimizer, weights: Sequence[TrainedWeight], gradients: Mapping[str, Tensor], lr: float
) -> None:
    for weight in weights:
        weight.values.grad = gradients[weight.name].clone() if weight.values.numel() else None
    for group in built.param_groups:
        group["lr"] = lr
    built.step()


def _cut_rows(whole: Tensor) -> tuple[Tensor, Tensor]:
    rows = len(whole) if whole.ndim == 1 else len(whole) // 2
    return whole[:rows], whole[rows:]


def _cut_range(whole: Tensor) -> tuple[Tensor, Tensor]:
    """Divide a matrix in the middle of a row, but give a whole vector to the second rank."""
    first = 0 if whole.ndim == 1 else whole.numel() // 2 + 1
    return whole.flatten()[:first], whole.flatten()[first:]
