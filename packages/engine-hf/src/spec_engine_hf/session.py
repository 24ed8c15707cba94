"""Session holds sequences that are decoded together, and their KV cache in the target.

Shape suffixes: B sequences, T tokens of a forward pass, L columns of the cache, N wanted layers, H hidden size,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spec_core.records import images_of
from spec_engine_hf.hf_model import HfModel, target_errors
from spec_engine_hf.kv_cache import KvCache

_MOST_TOKENS = 8192
"""Largest number of tokens of a forward pass over several prompts, padding included."""


class Session:
    """Sequences that share one KV cache; only one sequence if layers of the target cannot drop tokens."""

    def __init__(self, model: HfModel, layers: tuple[int, ...]) -> None:
        """Start without tokens. Forward passes return the states that enter ``layers``."""
        self._model = model
        self._layers = layers
        self._empty()

    def _empty(self) -> None:
        model = self._model
        config = model.causal_lm.config if model.unrewindable_layers() else None
        self._cache = KvCache(config, gaps=model.counts_positions)
        self._num_new: list[int] = []
        """Number of tokens appended to each sequence since the last call of ``keep``."""
        self._shifts: list[int] = []
        """Each sequence's position minus its token index, for tokens after the prompt. They differ because an
        image has fewer positions than tokens."""

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, list[Tensor]]:
        """Add prompts to the running sequences; return their last logits [B, 1, V] and their states [T, N, H].

        The last token of each prompt counts as appended. A prompt with images has a forward pass of its own. Prompts
        that one long prompt would pad to too many tokens are divided into several passes.
        """
        if len(prompts) > 1 and (
            any(map(images_of, prompts)) or len(prompts) * max(map(len, prompts)) > _MOST_TOKENS
        ):
            half = len(prompts) // 2
            parts = [self.prefill(prompts[:half]), self.prefill(prompts[half:])]
            return torch.cat([logits for logits, _ in parts]), [part for _, own in parts for part in own]
        if len(self._cache):
            begun = Session(self._model, self._layers)
            found = begun.prefill(prompts)
            self._cache.join(begun._cache)
            self._num_new += begun._num_new
            self._shifts += begun._shifts
            return found
        return self._begin(prompts)

    def _begin(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, list[Tensor]]:
        longest = max(map(len, prompts))
        rows = [[*[0] * (longest - len(prompt)), *prompt] for prompt in prompts]
        own_BT = torch.arange(longest, 0, -1) <= torch.tensor([len(prompt) for prompt in prompts])[:, None]
        self._shifts = [0] * len(prompts)
        seen: dict[str, Tensor] = {}
        if images := images_of(prompts[0]):  # a prompt with images is alone
            seen = self._model.image_arguments(prompts[0], images)
            self._shifts = [int(seen["position_ids"].max()) + 1 - longest]
        logits_B1V, hidden_BTNH = self._forward(rows, own_BT, seen, last_only=True)
        hidden = [states[longest - len(p) :] for states, p in zip(hidden_BTNH, prompts, strict=True)]
        self._num_new = [1] * len(prompts)
        return logits_B1V, hidden

    def forward(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Append T tokens to each sequence; return logits, float32 [B, T, V], and states [B, T, N, H].

        A shorter row is padded on the right with tokens that its own tokens do not attend to.
        """
        longest = max(map(len, rows))
        self._num_new = [longest] * len(rows)
        own_BT = torch.ones(len(rows), longest, dtype=torch.bool)
        return self._forward(
            [[*row, *[0] * (longest - len(row))] for row in rows], own_BT, {}, last_only=False
        )

    def keep(self, counts: Sequence[int]) -> None:
        """Keep the first ``counts[i]`` of the tokens appended to sequence i. A sequence that keeps none ends."""
        live = [row for row, count in enumerate(counts) if count]
        if not live:
            self._empty()
            return
        self._cache.keep(live, [self._num_new[row] - counts[row] for row in live])
        self._num_new = [0] * len(live)
        self._shifts = [self._shifts[row] for row in live]

    @torch.no_grad()
    def _forward(
        self, rows: Sequence[Sequence[int]], own_BT: Tensor, seen: dict[str, Tensor], last_only: bool
    ) -> tuple[Tensor, Tensor]:
        model = self._model
        states: list[Tensor] = []
        ids_BT = torch.tensor(rows, dtype=torch.int64, device=model.device)
        # A tensor: for the number 1, Gemma 4 would compute its upper layers for the last token alone. 0 means all.
        keep = torch.tensor([len(rows[0]) - 1], device=model.device) if last_only else 0
        taps = model.tapped(self._layers, lambda _, state_BTH: states.append(state_BTH))
        self._cache.extend(own_BT)
        with taps, target_errors(model.target):
            output = model.causal_lm(
                ids_BT,
                use_cache=True,
                logits_to_keep=keep,
                **{model.cache_argument: self._cache.past},
                **(seen or self._mask_and_positions(len(rows[0]))),
            )
        empty_BTNH = torch.empty(*ids_BT.shape, 0, model.target.hidden_size, device=model.device)
        return output.logits.float(), torch.stack(states, dim=2) if states else empty_BTNH

    def _mask_and_positions(self, num_new: int) -> dict[str, Tensor]:
        """Return the columns' attention mask, and the positions of the new columns.

        The result is empty if all columns hold tokens and no sequence has images.
        """
        own_BL = self._cache.own_BL
        if own_BL.all() and not any(self._shifts):
            return {}
        arguments = {"attention_mask": own_BL.to(self._model.device, torch.int64)}
        if self._model.takes_positions:
            position_BL = (own_BL.cumsum(dim=1) - 1).clamp(min=0) + torch.tensor(self._shifts)[:, None]
            arguments["position_ids"] = position_BL[:, -num_new:].to(self._model.device)
        return arguments
