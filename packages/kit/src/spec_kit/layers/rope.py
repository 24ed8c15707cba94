"""Compute rotary position embeddings by the target's conventions (Hugging Face ``rope_parameters``)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Angles = tuple[Tensor, Tensor]
"""Cos and sin of the rotary angles."""


class Rope:
    """Rotary angles for the first channels of each head; the other channels stay unrotated.

    It is no ``nn.Module``, so the frequencies stay float32 if the draft is cast to another dtype, as in the
    engines.
    """

    def __init__(self, rope: Mapping[str, Any], head_dim: int, max_positions: int) -> None:
        """Compute the frequencies; ``rope``: Hugging Face ``rope_parameters``."""
        dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
        self._frequency_by_device = {torch.device("cpu"): inverse_frequencies(rope, dim, max_positions)}
        self.scale = attention_scale(rope, max_positions)

    def angles(self, position_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin of integer positions, [T, 1, rotated / 2] each, for ``rotate``."""
        wide = torch.promote_types(dtype, torch.float32)
        angle = position_T.to(wide)[:, None, None] * self._frequencies(position_T.device).to(wide)
        return (angle.cos() * self.scale).to(dtype), (angle.sin() * self.scale).to(dtype)

    def angles_of_steps(self, position_N: Tensor, num_steps: int, dtype: torch.dtype) -> list[Angles]:
        """Return the angles of ``position_N`` + s for each step s, as ``angles`` does, all computed together."""
        step_S1 = torch.arange(num_steps, device=position_N.device)[:, None]
        cos, sin = self.angles((position_N + step_S1).flatten(), dtype)
        return list(zip(cos.chunk(num_steps), sin.chunk(num_steps), strict=True))

    def _frequencies(self, device: torch.device) -> Tensor:
        if device not in self._frequency_by_device:
            self._frequency_by_device[device] = self._frequency_by_device[torch.device("cpu")].to(device)
        return self._frequency_by_device[device]


def rotate(heads_TND: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Return ``heads_TND`` [T, heads, head_dim] with its channel pairs (i, i + rotated / 2) rotated."""
    cos, sin = angles
    half = cos.shape[-1]
    first = heads_TND[..., :half]
    second = heads_TND[..., half : 2 * half]
    turned = [first * cos - second * sin, second * cos + first * sin, heads_TND[..., 2 * half :]]
    return torch.cat(turned, dim=-1)


def inverse_frequencies(rope: Mapping[str, Any], dim: int, max_positions: int) -> Tensor:
    """Return the inverse frequencies, float32 [dim / 2], as transformers' ``ROPE_INIT_FUNCTIONS`` do."""
    theta = rope.get("rope_theta", 10_000.0)
    frequency = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    kind = rope.get("rope_type", "default")
    if kind == "linear":
        return frequency / rope["factor"]
    if kind == "llama3":
        return _llama3(frequency, rope)
    if kind == "yarn":
        return _yarn(frequency, rope, theta, max_positions)
    return frequency


def attention_scale(rope: Mapping[str, Any], max_positions: int) -> float:
    """Return the factor on cos and sin: 1, except for YaRN (arXiv 2309.00071)."""
    if rope.get("rope_type", "default") != "yarn":
        return 1.0
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    factor = _yarn_factor(rope, max_positions)
    scale, scale_all = rope.get("mscale"), rope.get("mscale_all_dim")
    if scale and scale_all:
        return _yarn_scale(factor, scale) / _yarn_scale(factor, scale_all)
    return _yarn_scale(factor, 1.0)


def _llama3(frequency: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Divide the frequencies of long waves by ``factor``, keep short waves, blend between (Llama 3.1)."""
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    context = rope["original_max_position_embeddings"]
    wave = 2 * math.pi / frequency
    blend = (context / wave - low) / (high - low)
    between = (1 - blend) * frequency / factor + blend * frequency
    slowed = torch.where(wave > context / low, frequency / factor, frequency)
    return torch.where((wave >= context / high) & (wave <= context / low), between, slowed)


def _yarn(frequency: Tensor, rope: Mapping[str, Any], theta: float, max_positions: int) -> Tensor:
    """Keep the frequencies of channels that turn often in the original context; divide the others."""
    dim = 2 * len(frequency)
    context = rope.get("original_max_position_embeddings") or max_positions

    def channel(turns: float) -> float:
        return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = channel(rope.get("beta_fast") or 32), channel(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low = max(low, 0)
    high = min(high, dim - 1)
    width = high - low if high != low else 0.001
    kept = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    slowed = 1.0 / (_yarn_factor(rope, max_positions) * (1.0 / frequency))
    return slowed * (1 - kept) + frequency * kept


def _yarn_factor(rope: Mapping[str, Any], max_positions: int) -> float:
    context = rope.get("original_max_position_embeddings") or max_positions
    return rope.get("factor") or max_positions / context


def _yarn_scale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
