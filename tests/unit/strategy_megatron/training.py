"""Runs of real drafts under a strategy, in real processes: what the tests of megatron compare with fsdp."""

import shutil
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from safetensors.torch import save

from spec_core import StepConfig, Strategy, no_kernel
from spec_draft_dflash.draft import DFlashDraft
from spec_draft_dflash2.draft import DFlash2Draft
from spec_draft_dflash2.lilicorr.draft import LiLiCorrDraft
from spec_draft_dspark.draft import DSparkDraft
from spec_draft_eagle3.draft import Eagle3Draft
from spec_draft_mtp.draft import MtpDraft
from spec_draft_peagle.draft import PEagleDraft
from spec_kit.drafting import write_draft
from spec_kit.layers import Fp8Layers, use_fp8_head
from spec_kit.sharding import SafetensorsFolder
from spec_optimizers.adamw import AdamWOptimizer
from spec_optimizers.muon import MuonOptimizer
from spec_testing.draft_workbench import build, file_bytes
from spec_testing.processes import Rank, run_ranks
from spec_testing.toy_target import toy_batch, toy_target

LR = 3e-5
LIMIT_S = 600.0
"""Minutes more than the runs of one call take: a loaded machine is no failure."""
LENGTHS = (11, 1, 7, 19, 5, 2, 13, 9)
IMAGE = 8
"""A token that occurs in the documents."""
SIZES = {"vocab_size": 98, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "image_token_id": IMAGE}
DRAFTS = {
    "eagle3": (Eagle3Draft, {"num_steps": 3, "vocab_size": 30, "num_kv_heads": 1}),  # replicated
    "eagle3 whole": (
        Eagle3Draft,
        {"num_steps": 3, "num_layers": 2, "loss": "lk_lambda"}
        | dict.fromkeys(("norm_before_residual", "norm_before_fc", "qk_norm"), True),
    ),
    "eagle3 mla": (
        Eagle3Draft,
        {"num_steps": 3, "num_layers": 2, "vocab_size": 30, "attention": "mla"}
        | {
            "q_lora_rank": 12,
            "kv_lora_rank": 10,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
        },
    ),
    "eagle3 merged": (Eagle3Draft, {"num_steps": 3, "image_embeddings": "merged"}),
    "dflash": (DFlashDraft, {"block_size": 4, "num_layers": 2, "num_features": 3}),
    "dflash2": (
        DFlash2Draft,
        {"block_size": 4, "num_layers": 2, "num_features": 3, "selector_rank": 8, "ce_weight": 0.5},
    ),
    "lilicorr": (
        LiLiCorrDraft,
        {"block_size": 4, "num_layers": 2, "num_features": 3, "lilicorr_hidden_size": 16, "soft_weight": 0.5},
    ),
    "dspark": (DSparkDraft, {"block_size": 4, "num_layers": 2, "num_features": 3, "markov_rank": 8}),
}
HEADS = {
    "mtp": (MtpDraft, {"num_steps": 3}),
    "peagle": (PEagleDraft, {"num_guesses": 3, "num_layers": 2, "segment_tokens": 20}),
}
"""Drafts whose division over tensor-parallel ranks the contract's suite alone tests."""
sys.path.append(str(Path(__file__).parents[2] / "plugins/spec-draft-medusa/src"))
STRANGERS = {"medusa": ("spec_draft_medusa.draft", "MedusaDraft", {"num_heads": 2})}
"""Drafts of third parties, without hints: ranks of a tensor-parallel group compute the same."""
OPTIMIZER = {"eps": 1e-4, "weight_decay": 0.01}
"""A large eps: next to a zero gradient AdamW would turn rounding into whole steps."""
OPTIMIZERS = {plugin.name: plugin for plugin in (AdamWOptimizer, MuonOptimizer)}
CLIP = 0.5
"""A small one: it acts."""


@dataclass(frozen=True)
class Run:
    """One training on every rank of a group."""

    strategy: type[Strategy]
    draft: str
    options: dict[str, object] = field(default_factory=dict)
    dtype: str = "float32"
    optimizer: str = "adamw"
    steps: int = 50
    draft_options: dict[str, object] = field(default_factory=dict)
    """Besides those in ``DRAFTS``."""
    resume_from: Path | None = None
    save_to: Path | None = None
    """Folder for the state at the end."""
    fp8: str = ""
    """Products in fp8, as ``train.fp8``."""
    is_forced: bool = False
    """Whether Megatron's configuration is made to say that tokens are divided, whatever it was asked for."""


@dataclass
class Result:
    losses: list[float]
    grad_norms: list[float]
    evaluated: float
    metrics: dict[str, Any]
    weights: bytes
    """All weights of the draft, as safetensors."""
    exported: dict[str, bytes]
    """The files of the draft as rank 0 exports it."""
    pushed: bytes
    """The same tensors as a push sends them: gathered one after the other."""


def train(world_size: int, folder: Path, *runs: Run) -> list[Result]:
    """Return what rank 0 saw of each run; every rank must have seen the same."""
    folder.mkdir(exist_ok=True)
    everyones = run_ranks(_rank, world_size, runs, folder, timeout_s=LIMIT_S)
    for others in everyones[1:]:
        for one, other in zip(everyones[0], others, strict=True):
            assert (one.losses, one.grad_norms, one.weights) == (
                other.losses,
                other.grad_norms,
                other.weights,
            )
    return everyones[0]


def _rank(me: Rank, runs: Sequence[Run], folder: Path) -> list[Result]:
    store = dist.FileStore(str(folder / f"group-{me.world_size}"), me.world_size)
    dist.init_process_group("gloo", store=store, rank=me.rank, world_size=me.world_size)
    results = [_train(run, folder, me) for run in runs]
    dist.destroy_process_group()
    return results


def _train(run: Run, folder: Path, me: Rank) -> Result:
    plugin, options = draft_of(run.draft)
    draft = plugin(plugin.Config.model_validate({"name": plugin.name, **options, **run.draft_options}))
    target = toy_target(folder, **SIZES)
    bench = build(draft, target, others={target.norm_name: torch.ones(target.hidden_size)})
    layers = Fp8Layers(no_kernel)
    if run.fp8 == "layers":
        bench = bench.with_kernels(layers.find)
        layers.attach(bench.module)
    chosen = OPTIMIZERS[run.optimizer]
    optimizer = chosen(chosen.Config.model_validate({"name": run.optimizer, **OPTIMIZER}))
    settings = StepConfig.model_validate({"dtype": run.dtype, "clip": CLIP})
    config = run.strategy.Config.model_validate({"name": run.strategy.name, **run.options})
    hints = draft.shard_hints(bench.target)
    run.strategy.check(config, bench.target, hints)
    place = run.strategy.data_parallel(config, me.rank, me.world_size)
    samples = bench.samples(LENGTHS)
    assert run.draft != "eagle3 merged" or any(IMAGE in sample.input_ids for sample in samples)
    denominators = bench.denominators(samples)
    mine = samples[place.rank :: place.size]
    batches = [toy_batch(part, bench.schema) for part in (mine[::2], mine[1::2])]
    losses, norms = [], []
    with run.strategy(config, settings, optimizer, torch.device("cpu")) as strategy:
        with _forced() if run.is_forced else nullcontext():
            strategy.attach(bench.module, hints)
        ops = strategy.vocabulary_ops(bench.target, bench.tensors)
        if run.fp8:
            use_fp8_head(ops, no_kernel)
        if run.resume_from is not None:
            strategy.load(SafetensorsFolder(run.resume_from))
        for _ in range(run.steps):
            done = strategy.step(batches, denominators, ops, LR)
            losses.append(done.output.loss.item())
            norms.append(done.grad_norm.item())
        if run.save_to is not None:
            run.save_to.mkdir(exist_ok=True)
            dist.barrier(dist.group.WORLD)
            strategy.save(SafetensorsFolder(run.save_to))
        evaluated = strategy.evaluate(batches, denominators, ops)
        full = strategy.full_weights()
        gathered = {name: value.clone() for name, value in strategy.gather_weights()}
    weights = save({name: value.contiguous() for name, value in full.items()})
    exported, pushed = dict[str, bytes](), b""
    if me.rank == 0:
        files = folder / "exported"
        shutil.rmtree(files, ignore_errors=True)
        files.mkdir()
        write_draft(draft, full, bench.target, files)
        exported, pushed = file_bytes(files), save(dict(draft.exported_tensors(gathered, bench.target)))
    return Result(losses, norms, evaluated.loss.item(), evaluated.metrics(), weights, exported, pushed)


def draft_of(name: str) -> tuple[Any, dict[str, object]]:
    """Return a draft's plugin class, and its options."""
    if name in DRAFTS or name in HEADS:
        return (DRAFTS | HEADS)[name]
    module, plugin, options = STRANGERS[name]
    return getattr(import_module(module), plugin), options


def _forced() -> AbstractContextManager[object]:
    """Return the context in which a configuration of Megatron says ``sequence_parallel``."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    made = TransformerConfig.__post_init__

    def forced(config: TransformerConfig) -> None:
        made(config)
        config.sequence_parallel = True

    return patch.object(TransformerConfig, "__post_init__", forced)
