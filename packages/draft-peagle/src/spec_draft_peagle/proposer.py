"""Reference drafting for P-EAGLE: all guesses in one pass over the cached rows.

Shapes: L known rows, K guesses, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from spec_core import Proposal, Proposer
from spec_draft_peagle.chains import Segment
from spec_kit.drafting import draw, uniform_numbers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Generator, Tensor

    from spec_core import VocabularyOps
    from spec_draft_peagle.model import PEagleModel
    from spec_kit.block_drafting import KeysValues


class PEagleProposer(Proposer):
    """Guesses the first token from the last row's state, and each further token from one mask token."""

    def __init__(self, module: PEagleModel, ops: VocabularyOps) -> None:
        """Start with an empty cache."""
        self._module, self._ops, self._length = module, ops, 0
        width = module.shape.hidden_size
        self._past: list[list[KeysValues]] = [[] for _ in module.layers]
        self._last = module.fc.weight.new_zeros(1, width)

    @torch.no_grad()
    def extend(self, next_ids: Sequence[int], hidden_TNH: Tensor) -> None:
        """Add keys and values of T more rows to the cache.

        The last captured state, which is the final norm's input, is not used.
        """
        stop = self._length + len(next_ids)
        states, own = self._advance(
            self._segment(stop, 0), torch.tensor(next_ids, dtype=torch.int64), hidden_TNH[:, :-1]
        )
        for layer, (keys, values) in zip(self._past, own, strict=True):
            layer[:] = [_joined(layer, keys, values)]
        self._last, self._length = states[-1:], stop

    @torch.no_grad()
    def propose(self, num_tokens: int, temperature: float, generator: Generator) -> Proposal:
        """Guess ``num_tokens`` tokens at once; keys and values of mask tokens are not cached."""
        if num_tokens == 0:
            return Proposal(token_ids=())
        module = self._module
        nothing = module.fc.weight.new_zeros(0, module.shape.num_captured, module.shape.hidden_size)
        ids = torch.zeros(0, dtype=torch.int64)
        states, _ = self._advance(self._segment(self._length, num_tokens - 1), ids, nothing)
        logits_KV = module.lm_head(torch.cat([self._last, states])).float()
        if temperature == 0:
            return Proposal(token_ids=tuple(module.ids_V[logits_KV.argmax(-1)].tolist()))
        probs_KV = (logits_KV / temperature).softmax(-1)
        row_K = draw(probs_KV, uniform_numbers([generator], num_tokens)[0].to(probs_KV.device))
        return Proposal(
            token_ids=tuple(module.ids_V[row_K].tolist()), probs_KV=self._over_target_vocabulary(probs_KV)
        )

    def _segment(self, stop: int, num_masks: int) -> Segment:
        """Return a segment of the new rows up to ``stop``, with one chain of mask tokens at the last row."""
        chains = min(num_masks, 1)
        return Segment(
            first=self._length,
            stop=stop,
            bounds=((0, stop),),
            anchor_A=torch.full((chains,), stop - 1),
            start_A=torch.zeros(chains, dtype=torch.int64),
            count_A=torch.full((chains,), num_masks),
        )

    def _advance(
        self, segment: Segment, next_R: Tensor, hidden_RNH: Tensor
    ) -> tuple[Tensor, list[KeysValues]]:
        device = self._module.fc.weight.device
        return self._module.advance(
            segment, (next_R.to(device), hidden_RNH.to(device)), self._past, self._ops
        )

    def _over_target_vocabulary(self, probs_KV: Tensor) -> Tensor:
        """Return probabilities over the target's vocabulary [K, V], from those over the rows of the draft's head."""
        module = self._module
        if module.d2t is None:
            return probs_KV
        full_KV = probs_KV.new_zeros(len(probs_KV), module.shape.target_vocab_size)
        return full_KV.index_copy(1, module.ids_V, probs_KV)


def _joined(layer: Sequence[KeysValues], keys: Tensor, values: Tensor) -> KeysValues:
    return torch.cat([*(k for k, _ in layer), keys]), torch.cat([*(v for _, v in layer), values])
