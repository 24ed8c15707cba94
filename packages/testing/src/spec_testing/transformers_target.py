"""TransformersTarget is the reference of engines for a target that Transformers runs."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class TransformersTarget:
    """A ReferenceTarget: a target as its own authors run it in float32, without cache and batch.

    It needs the package transformers.
    """

    def __init__(self, folder: Path) -> None:
        """Load the target in ``folder``."""
        transformers: Any = importlib.import_module("transformers")
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32
        ).eval()

    @torch.no_grad()
    def hidden(self, token_ids: Sequence[int]) -> Tensor:
        """Return [T, N + 1, H]: the residual stream that enters each of N layers and, last, the final norm."""
        final: list[Tensor] = []

        def keep(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
            final.append(inputs[0])

        hook = self.model.model.norm.register_forward_pre_hook(keep)
        output = self.model(torch.tensor([list(token_ids)]), output_hidden_states=True)
        hook.remove()
        # The last entry of hidden_states is already normed; the norm's own input takes its place.
        return torch.stack([*output.hidden_states[:-1], final[0]], dim=2)[0]

    @torch.no_grad()
    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """Return the logits, float32 [T, V]."""
        return self.model(torch.tensor([list(token_ids)])).logits[0]
