"""Write what a shallow random target (``random_target.py --shallow``) answers, as data for ``spec-trainer``.

python benchmarks/shallow_answers.py TARGET FILE 2048 256     # rows, and tokens of each

Its layers change next to nothing, so its head applied to a token's normed embedding says which token comes next.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open

if TYPE_CHECKING:
    from torch import Tensor

NAMES = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
EPSILON = 1e-6
AT_ONCE = 512


@torch.inference_mode()
def shallow_answers(folder: Path, num_rows: int, num_tokens: int) -> Tensor:
    """Return token ids [rows, tokens]: random first tokens, and what the target answers to each."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    embedding_VH, norm_H, head_VH = (tensor.to(device) for tensor in _tensors(folder))
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randint(len(embedding_VH), (num_rows,), generator=draw).to(device)]
    while len(rows) < num_tokens:
        hidden_RH = embedding_VH[rows[-1]].float()
        normed_RH = hidden_RH * torch.rsqrt(hidden_RH.square().mean(-1, keepdim=True) + EPSILON)
        normed_RH = normed_RH.to(head_VH.dtype) * norm_H
        rows.append(torch.cat([(part @ head_VH.T).argmax(-1) for part in normed_RH.split(AT_ONCE)]))
    return torch.stack(rows, 1).cpu()


def _tensors(folder: Path) -> list[Tensor]:
    files = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    found = []
    for name in NAMES:
        with safe_open(folder / files[name], "pt") as file:
            found.append(file.get_tensor(name))
    return found


def main() -> None:
    """Write the rows that the command line asks for."""
    target, file, num_rows, num_tokens = sys.argv[1:]
    with Path(file).open("w") as rows:
        for ids in shallow_answers(Path(target), int(num_rows), int(num_tokens)).tolist():
            rows.write(json.dumps({"input_ids": ids, "loss_mask": [0] + (len(ids) - 1) * [1]}) + "\n")


if __name__ == "__main__":
    main()
