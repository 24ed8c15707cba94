"""Operators that vllm-ascend calls besides those of ``npu_operators.py``, in plain torch.

Call ``install`` before vllm-ascend's worker is imported.
"""

import importlib.abc
import importlib.machinery
import sys
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


class Absent(type):
    """A class of a module that is not there: all of its attributes are strings."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class AbsentModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules that need CANN, or a GPU, and that are imported by names alone."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        is_absent = name.partition(".")[0] in {"acl", "fla_npu", "torchvision"}
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_absent else None

    def create_module(self, spec: Any) -> None:
        """Let Python make the module."""

    def exec_module(self, module: ModuleType) -> None:
        def lacking(name: str) -> Absent:
            if name.startswith("__"):
                raise AttributeError(name)
            return Absent(name, (), {})

        module.__getattr__ = lacking  # type: ignore[method-assign]


def install() -> None:
    """Stand in for the compiled parts, for the life of the process."""
    import torch_npu
    import torch_npu.op_plugin.atb._atb_ops as atb

    sys.meta_path.insert(0, AbsentModules())
    atb._register_atb_extensions = lambda: None
    for function in (npu_mrope, npu_scatter_pa_kv_cache, npu_fused_infer_attention_score):
        setattr(torch_npu, function.__name__, function)
    torch_npu._npu_matmul_add_fp32 = lambda x, weight, sums: None  # a warm-up: nobody reads the sums
    import vllm_ascend.utils
    from vllm_ascend.worker import block_table

    sys.modules["vllm_ascend.vllm_ascend_C"] = ModuleType("vllm_ascend.vllm_ascend_C")
    vllm_ascend.utils._CUSTOM_OP_ENABLED = False
    OWN.define(
        "npu_add_rms_norm_bias(Tensor x, Tensor y, Tensor w, Tensor? b, float e) -> (Tensor, Tensor, Tensor)"
    )
    OWN.impl("npu_add_rms_norm_bias", npu_add_rms_norm_bias, "CompositeExplicitAutograd")
    block_table._compute_slot_mapping_kernel = SlotMapping()


OWN = torch.library.Library("_C_ascend", "DEF")


def npu_add_rms_norm_bias(
    x: Tensor, y: Tensor, w: Tensor, b: Tensor | None, e: float
) -> tuple[Tensor, Tensor, Tensor]:
    total = x + y
    rstd = (total.float().square().mean(-1, keepdim=True) + e).rsqrt()
    return (total * rstd).to(x.dtype) * w + (0 if b is None else b), rstd, total


def npu_mrope(
    positions: Tensor, query: Tensor, key: Tensor, cos_sin_cache: Tensor, head_size: int, **_: Any
) -> tuple[Tensor, Tensor]:
    cos, sin = cos_sin_cache[positions][:, None].chunk(2, -1)

    def rotated(x: Tensor) -> Tensor:
        first, second = x.view(len(x), -1, head_size).chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).flatten(1)

    return rotated(query), rotated(key)


def npu_scatter_pa_kv_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, cache_mode: str
) -> None:
    written = slot_mapping >= 0
    blocks = slot_mapping[written].long()
    for new, cache in ((key, key_cache), (value, value_cache)):
        cache[blocks // cache.shape[1], blocks % cache.shape[1]] = new[: len(written)][written]


def npu_fused_infer_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    num_heads: int,
    num_key_value_heads: int,
    scale: float,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return causal attention of packed sequences to themselves, or to the blocks of a cache."""
    table, causal = others["block_table"], others["sparse_mode"] == 3
    answers, ends_kv = [], [0, *others["actual_seq_lengths_kv"]]
    for i, (begin, end) in enumerate(pairwise([0, *others["actual_seq_lengths"]])):
        rows = slice(ends_kv[i], ends_kv[i + 1])
        pages = None if table is None else table[i].long()
        k, v = (x[rows] if pages is None else x[pages].flatten(0, 1)[: ends_kv[i + 1]] for x in (key, value))
        k, v = (
            x.reshape(len(x), num_key_value_heads, -1).repeat_interleave(num_heads // num_key_value_heads, 1)
            for x in (k, v)
        )
        scores = torch.einsum("qhd,khd->hqk", query[begin:end], k) * scale
        if causal:
            later = torch.ones(end - begin, len(k)).triu(len(k) - (end - begin) + 1).bool()
            scores = scores.masked_fill(later.to(scores.device), float("-inf"))
        answers.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
    return torch.cat(answers), None


class SlotMapping:
    """vllm-ascend's kernel in Triton: the slot of each token in the cache."""

    def __getitem__(self, grid: tuple[int]) -> Any:
        def run(
            num: int,
            most: int,
            starts: Tensor,
            positions: Tensor,
            table: Tensor,
            *others: Any,
            **padding: Any,
        ) -> None:
            _, block_size, slots = others
            slots.fill_(padding["PAD_ID"])
            for row, (begin, end) in enumerate(pairwise(starts[: grid[0]].tolist())):
                at = positions[begin:end].long()
                slots[begin:end] = (table[row].long()[at // block_size] * block_size + at % block_size).to(
                    slots.dtype
                )

        return run
