"""The reference of engines: a target by Transformers, driven by hand."""

from collections.abc import Sequence
from pathlib import Path

import torch
import transformers


class Transformer:
    """A target as its own authors run it: all hidden states kept, no cache, no batch."""

    def __init__(self, folder: Path) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def hidden(self, token_ids: Sequence[int]) -> torch.Tensor:
        final: list[torch.Tensor] = []
        hook = self.model.model.norm.register_forward_pre_hook(lambda _, args: final.append(args[0]))
        output = self.model(torch.tensor([list(token_ids)]), output_hidden_states=True)
        hook.remove()
        # The last entry of hidden_states is already normed; the norm's own input takes its place.
        return torch.stack([*output.hidden_states[:-1], final[0]], dim=2)[0]

    @torch.no_grad()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        return self.model(torch.tensor([list(token_ids)])).logits[0]
