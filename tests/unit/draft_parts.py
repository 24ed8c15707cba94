"""Instruments of all drafts' tests: targets, sizes in memory, gradients, and a vocabulary in two shards."""

import threading
import weakref
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from spec_core import Draft, FindKernel, TargetSpec, TargetTensors, no_kernel
from spec_core.records import StepOutput
from spec_kit.layers import TargetOps

CPU = torch.device("cpu")


def make_target(**changes) -> TargetSpec:
    """Return a tiny target, a Qwen3; ``changes``: other values of its fields."""
    fields = {
        "folder": Path("target"),
        "architecture": "Qwen3ForCausalLM",
        "model_type": "qwen3",
        "digest": "0" * 64,
        "num_layers": 8,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "vocab_size": 29,
        "max_positions": 64,
        "dtype": "float32",
        "embedding_name": "model.embed_tokens.weight",
        "head_name": "lm_head.weight",
        "norm_name": "model.norm.weight",
        "rope": {"rope_type": "default", "rope_theta": 100.0},
        "eos_token_ids": (3,),
    }
    return TargetSpec(**(fields | changes))


def make_tensors(target: TargetSpec) -> TargetTensors:
    """Weights of order one, so that distributions are peaked and arg-maxima differ from row to row."""
    generator = torch.Generator().manual_seed(1)
    shape = (target.vocab_size, target.hidden_size)
    return TargetTensors(
        embedding_VH=torch.randn(shape, generator=generator),
        head_VH=torch.randn(shape, generator=generator),
        norm_H=1 + 0.2 * torch.randn(target.hidden_size, generator=generator),
    )


def make_ops(target: TargetSpec, dtype: torch.dtype = torch.float32) -> TargetOps:
    return TargetOps(target, make_tensors(target), CPU, dtype)


def build_large(
    draft: Callable[[Any], Draft],
    target: TargetSpec,
    config: Any,
    dtype: torch.dtype = torch.float32,
    kernel: FindKernel = no_kernel,
    loud: str = "\n",
) -> torch.nn.Module:
    """Return a module with weights so large that each part matters; names that contain ``loud`` have the largest."""
    torch.manual_seed(2)
    counts = torch.randint(0, 5, (target.vocab_size,))
    module = draft(config).build(target, make_tensors(target), counts, kernel)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn_like(parameter)
            parameter.add_(noise * (0.8 if loud in name else 0.2 if parameter.dim() == 1 else 0.15))
    return module.to(dtype)


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


def gradients(module):
    return {name: parameter.grad.clone() for name, parameter in module.named_parameters()}


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


class LiveBytes(TorchDispatchMode):
    """Records the most bytes that the operators inside have allocated at a time, each storage counted once."""

    def __init__(self) -> None:
        super().__init__()
        self._known, self._now, self.most = WeakIdKeyDictionary(), 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage() not in self._known:
                self._add(leaf.untyped_storage())
        return out

    def _add(self, storage):
        self._known[storage] = True
        self._now += storage.nbytes()
        self.most = max(self.most, self._now)
        weakref.finalize(storage, self._free, storage.nbytes())

    def _free(self, num_bytes):
        self._now -= num_bytes


class CountingOps(TargetOps):
    """Counts rows that are multiplied by the target's head, and the most of them at a time."""

    rows = largest = 0

    def teacher_logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        self.rows += len(hidden_RH)
        self.largest = max(self.largest, len(hidden_RH))
        return super().teacher_logits(hidden_RH)


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


def assert_shards_agree(
    run: Callable[[TargetOps], tuple[StepOutput, list[torch.Tensor]]],
    cut: int = 17,
    rows: Collection[int] = (),
) -> None:
    """Two shards of the vocabulary, cut before the token ``cut``, give the whole vocabulary's step.

    ``run`` returns a step and gradients with given ops; of the tensors with the indices ``rows`` each shard has its
    own rows alone.
    """
    target, exchange = make_target(), Exchange()
    whole, expected = run(make_ops(target, torch.float64))
    assert all(grad.any() for grad in expected)
    with ThreadPoolExecutor(2) as pool:
        shards = [ShardOps(target, make_tensors(target), rank, cut, exchange) for rank in (0, 1)]
        results = list(pool.map(run, shards))
    for (output, grads), (start, stop) in zip(results, [(0, cut), (cut, None)], strict=True):
        torch.testing.assert_close(output.loss, whole.loss)
        torch.testing.assert_close(output.metrics(), whole.metrics())
        own = [grad[start:stop] if index in rows else grad for index, grad in enumerate(expected)]
        torch.testing.assert_close(grads, own)
