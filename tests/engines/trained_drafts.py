"""Drafts that learn a little of the answers of tiny targets: their configuration, and the rows."""

import json
from dataclasses import dataclass
from pathlib import Path

from spec_backend_cpu.backend import CpuBackend
from spec_core import EngineContext
from spec_core.records import SamplingParams
from spec_engine_hf.engine import HfConfig, HfEngine
from spec_kit.targets.target_reader import read_target

NEW_TOKENS = 80
"""Tokens of each of 64 answers: more than the 5,000 that an acceptance length wants."""
DRAFTS = {
    "eagle3": [
        "draft.vocab_size=80",
        "draft.num_steps=3",
        "draft.intermediate_size=256",
        "train.lr=8e-3",
        "train.steps=150",
    ],
    "eagle3, two layers, window": [
        "draft.num_layers=2", "draft.sliding_window=8", "draft.num_steps=3",
        "draft.intermediate_size=256", "draft.norm_before_residual=true", "draft.norm_before_fc=true",
        "draft.qk_norm=true", "train.lr=4e-3", "train.steps=150",
    ],
    "eagle3, mla": [
        "draft.attention=mla", "draft.vocab_size=80", "draft.num_steps=3", "draft.intermediate_size=256",
        "train.lr=4e-3", "train.steps=150",
    ],
    "dflash": [
        "draft.block_size=4", "draft.anchor_share=1.0", "draft.num_layers=2", "draft.num_features=3",
        "train.lr=3e-3", "train.steps=120",
    ],
    "dflash, reduced": [
        "draft.vocab_size=80", "draft.block_size=4", "draft.anchor_share=1.0", "draft.num_layers=2",
        "draft.num_features=3", "train.lr=3e-3", "train.steps=120",
    ],
    "peagle": [
        "draft.num_guesses=3", "draft.num_layers=2", "draft.norm_before_residual=true",
        "draft.norm_before_fc=true", "draft.retention=1.0", "draft.vocab_size=80", "train.lr=2e-3",
        "train.steps=150",
    ],
    "mtp": ["draft.num_steps=3", "train.lr=8e-3", "train.steps=150"],
    "mtp, experts": ["draft.num_steps=3", "train.lr=8e-3", "train.steps=150"],
    "medusa": ["draft.num_heads=3", "train.lr=8e-3", "train.steps=150"],
}  # fmt: skip


@dataclass(frozen=True)
class Trained:
    name: str
    target: Path
    folder: Path
    prompts: list[list[int]]
    """The draft has learned the target's answers to every second one of them."""


def write_answers(target: Path, prompts: list[list[int]], file: Path) -> None:
    """Write rows with the target's greedy answers."""
    sampling = SamplingParams(max_new_tokens=NEW_TOKENS, stop_at_eos=False)
    context = EngineContext(backend=CpuBackend(CpuBackend.Config()))
    with HfEngine.create(HfConfig(), read_target(target), context) as engine:
        answers = engine.generate(prompts, sampling)
    with file.open("w") as rows:
        for prompt, answer in zip(prompts, answers, strict=True):
            mask = [0] * len(prompt) + [1] * len(answer.token_ids)
            rows.write(json.dumps({"input_ids": [*prompt, *answer.token_ids], "loss_mask": mask}) + "\n")
