"""Instruments of both drafts' tests: sizes in memory, gradients, and a vocabulary in two shards."""

from __future__ import annotations

import threading

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spec_kit.drafting import TargetOps


class LargestOutput(TorchDispatchMode):
    """Records the largest number of elements that any operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.numel = max([self.numel, *sizes])
        return out


def assert_gradients(got, expected, tolerance):
    assert got.keys() == expected.keys()
    for name, grad in expected.items():
        error = (got[name] - grad).abs().max() / grad.abs().max().clamp(min=1e-300)
        assert error <= tolerance, f"{name}: relative error {error:.1e}"


class KeptForBackward:
    """Counts the bytes that autograd keeps of the operators inside, each storage once."""

    def __enter__(self):
        self._storages = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *raised):
        self._hooks.__exit__(*raised)

    def _pack(self, tensor):
        storage = tensor.untyped_storage()
        self._storages[storage.data_ptr()] = storage  # held, so that no other gets its address
        return tensor

    @property
    def num_bytes(self):
        return sum(storage.nbytes() for storage in self._storages.values())


class Exchange:
    """Lets two threads reduce a value each."""

    def __init__(self) -> None:
        self.barrier, self.values = threading.Barrier(2, timeout=30), {}

    def __call__(self, rank, value, reduce):
        self.values[rank] = value
        self.barrier.wait()
        result = reduce(self.values[0], self.values[1])
        self.barrier.wait()
        return result


class ShardOps(TargetOps):
    """Rows before or from ``cut`` of the target's head, in float64; ``exchange`` reduces with the other shard."""

    def __init__(self, target, tensors, rank, cut, exchange):
        super().__init__(target, tensors, torch.device("cpu"), torch.float64)
        self.rank, self.exchange = rank, exchange
        self._range = ((0, cut), (cut, target.vocab_size))[rank]

    @property
    def vocab_range(self):
        return self._range

    @property
    def head_VH(self):
        return super().head_VH[slice(*self._range)]

    def reduce_max(self, value_R):
        return self.exchange(self.rank, value_R, torch.maximum)

    def reduce_sum(self, value_R):
        return self.exchange(self.rank, value_R, torch.add)
