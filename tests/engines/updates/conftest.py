"""A draft, a worse one of the same shape, how weights travel between them, and what a vLLM notes of its guesses."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spec_backend_cpu.backend import CpuBackend
from spec_core import Engine, WeightTransport
from spec_core.records import SamplingParams
from spec_kit.weight_sync import open_weight_transports

from ..conftest import NUM_DRAFT_TOKENS
from ..trained_drafts import Trained

DRAFTED = SamplingParams(max_new_tokens=60, num_draft_tokens=NUM_DRAFT_TOKENS, stop_at_eos=False)
LIMIT_S = 120.0
HEAD = "lm_head.weight"
PROMPTS = slice(3)
DRAFTS = ["eagle3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dflash", "peagle"))]

Drafts = list[list[list[int]]]
"""The tokens that were drafted, for each prompt and round."""


@pytest.fixture(scope="module", params=DRAFTS)
def trained(request, trained_draft) -> Trained:
    return trained_draft(request.param)


@pytest.fixture(scope="module")
def worse(trained, tmp_path_factory) -> Path:
    """The trained draft with noise as large as its weights: next to no guess of it is right. Copies stay copies.

    The head of a block draft is made of rows of the target's head, and stays so.
    """
    folder = tmp_path_factory.mktemp(f"worse-{trained.name}") / "draft"
    shutil.copytree(trained.folder, folder)
    tensors = weights_of(folder)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not (name == HEAD and trained.name.startswith("dflash")):
            draw = torch.Generator().manual_seed(tensor.numel())
            noise = torch.randn(tensor.shape, generator=draw)
            tensors[name] = tensor + tensor.std().nan_to_num(0.1) * noise
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def transports() -> dict[str, WeightTransport]:
    return open_weight_transports(CpuBackend(CpuBackend.Config()), ["file"])


def weights_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


class Notes:
    """Notes that the rig writes in vLLM's processes."""

    def __init__(self, file: Path) -> None:
        self._drafts, self._swaps = file, file.with_name("swaps.jsonl")
        self._already = len(self._swaps.read_text().splitlines()) if self._swaps.exists() else 0
        """Swaps of other tests, which may have another target."""

    def drafted(self, engine: Engine, prompts: list[list[int]]) -> tuple[list[tuple[int, ...]], Drafts]:
        """Return text and drafts of each prompt, one after the other."""
        texts, drafts = [], []
        for prompt in prompts:
            already = len(self._drafts.read_text().splitlines()) if self._drafts.exists() else 0
            (answer,) = engine.generate([prompt], DRAFTED)
            lines = self._drafts.read_text().splitlines()[already:]
            texts.append(answer.token_ids)
            drafts.append([guesses for line in lines for guesses in json.loads(line).values()])
        return texts, drafts

    def target_digests(self) -> set[str]:
        lines = self._swaps.read_text().splitlines()[self._already :]
        return {digest for line in lines for digest in json.loads(line)}

    def plant(self, *fault: object) -> None:
        self._swaps.with_suffix(".fault").write_text(json.dumps(fault))


@pytest.fixture
def notes(draft_notes) -> Notes:
    return Notes(draft_notes)
