"""``spec-trainer quickstart``: train, export and measure a small draft, without downloads.

A tiny target is trained on the text that Python includes, and cached. Its hidden states are captured, and a draft is
trained on them and exported. The draft is measured on held-out *files* against the untrained draft and two baselines
that do not use hidden states.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from spec_core import Backend, Draft, Engine, plugins
from spec_core.records import SamplingParams
from spec_core.wording import counted
from spec_trainer.base.disk import cache_folder, check_writable, write_atomically
from spec_trainer.cli.commands.evaluate import export_untrained
from spec_trainer.cli.commands.train import run_training
from spec_trainer.cli.engine_output import engine_output_kept
from spec_trainer.cli.quickstart.corpus import MIN_CHARS, Document, python_documents, split_by_file
from spec_trainer.cli.quickstart.showcase import speeds, texts_and_topics
from spec_trainer.cli.quickstart.stages import DRAFT, MEASURE, READ, REPORT, TARGET, Stages
from spec_trainer.cli.quickstart.tiny_arithmetic import bfloat16_products, one_thread
from spec_trainer.cli.quickstart.tiny_target import (
    CPU,
    OPTIMIZER,
    TinyTargetConfig,
    build_tiny_target,
    tiny_target_cache_key,
)
from spec_trainer.configuration.engine_options import EngineOptions, EngineSections
from spec_trainer.configuration.plugin_names import DEFAULT_PLUGINS
from spec_trainer.data.tokens import Encoder
from spec_trainer.measure.evaluation.document import summarise
from spec_trainer.measure.evaluation.measure import decode_once_with, decode_with_draft, decode_without_draft
from spec_trainer.measure.evaluation.workload import Prompts, Workload
from spec_trainer.plan.resolve import resolve
from spec_trainer.report.page import write_report
from spec_trainer.run.directory import RunDirectory
from spec_trainer.run.model_card import write_run_card
from spec_trainer.run.serving import serving_commands
from spec_trainer.run.spec import RunSpec
from spec_trainer.training.wiring import create_engine
from spec_trainer.workers.passes import decode

T = TypeVar("T")

log = logging.getLogger(__name__)

HELD_OUT_SHARE = 0.06
PIECE_CHARS = 700
HELD_OUT_ROWS = 80
PROMPT_TOKENS = 48
CPU_CONCURRENCY = 4
"""Texts decoded at once on a CPU; with many more, a CPU has no spare compute to verify guesses."""
COMPARED_TOKENS = 64
"""Largest number of tokens of an answer with a baseline draft, of which only the acceptance length is measured."""


@dataclass(frozen=True, kw_only=True)
class QuickstartSize:
    """Sizes of the quickstart; with the defaults it takes some minutes on two cores.

    The run's config.yaml has every configuration key that training uses.
    """

    target: TinyTargetConfig = field(default_factory=TinyTargetConfig)
    library: Path | None = None
    """Folder of Python files from which the text is taken; None means this Python's standard library."""
    training: tuple[str, ...] = (
        "train.steps=160",
        "train.lr=7e-3",
        "train.global_batch_tokens=3072",
        "train.warmup_steps=20",
        # So few steps cannot wait for a slow mean (docs/decisions/014-initial-weights.md).
        "optimizer.betas=[0.8,0.95]",
        # A rate of 0.02 for matrices: the worst of five seeds is above AdamW's mean (docs/choose-a-draft.md).
        f"optimizer.name={OPTIMIZER}",
        "optimizer.matrix_rate=2.857",
        "train.eval_every=80",
        "train.save_every=80",
        "data.max_length=256",
    )
    seed: int = 0
    """Seed of the draft's training; ``TinyTargetConfig.seed`` is the seed of the target."""
    num_prompts: int = 32
    """Number of prompts: a multiple of the batches of 4 and of 32, so that no batch is incomplete."""
    sampling: SamplingParams = field(
        default_factory=lambda: SamplingParams(
            max_new_tokens=160, temperature=1.0, num_draft_tokens=3, stop_at_eos=False
        )
    )


class QuickstartFiles:
    """Paths in the cache folder, which later runs and the examples reuse."""

    def __init__(self, folder: Path) -> None:
        """Set the paths of the target and the data in ``folder``."""
        self.folder = folder
        self.target = folder / "target"
        """Folder of the tiny target."""
        self.train = folder / "train.jsonl"
        """File of the training rows."""
        self.held_out = folder / "held_out.jsonl"
        """File of the held-out rows."""


def run_quickstart(
    draft: str, engine: str, output: Path, size: QuickstartSize | None = None, backend: str = "cpu"
) -> dict[str, Any]:
    """Train the tiny target and a draft, measure the draft, write the report, and return the summary."""
    # Mistakes are found before minutes of training.
    draft_type = plugins.load_available(Draft, draft)
    plugins.load_available(Engine, engine)
    backend_type = plugins.load_available(Backend, backend)
    RunDirectory(output).check_folder()
    size = size or QuickstartSize()
    stages = Stages()
    device = backend_type(backend_type.Config()).device(0)
    files = prepare_files(size, stages, device)
    flags = {
        "target": str(files.target),
        "data.path": str(files.train),
        "data.eval_path": str(files.held_out),
        "backend.name": backend,
        "draft.name": draft,
        "engine.name": engine,
        "output": str(output),
        "seed": size.seed,
        **{f"draft.{key}": value for key, value in draft_type.small_run.items()},
    }
    stages.begin(DRAFT)
    run = resolve(None, flags, size.training)
    with bfloat16_products():
        summary = run_training(run)
    _link(run.directory.root / "inputs", files.folder)
    stages.begin(MEASURE)
    sampling = size.sampling
    if torch.empty(0, device=device).is_cpu:
        sampling = replace(sampling, concurrency=CPU_CONCURRENCY)
        summary["concurrency"] = CPU_CONCURRENCY
    summary |= _measure_all(run, held_out_prompts(run, size.num_prompts), sampling)
    summary["description"] = (
        f"{draft} draft for a tiny target; sampling at temperature {sampling.temperature}, "
        f"draft tokens: {sampling.num_draft_tokens}"
    )
    summary["serve"] = serving_commands(run.target, run.draft, run.directory.draft, sampling.num_draft_tokens)
    run.directory.write_summary(summary)
    write_run_card(run.directory.draft, run.draft, run.target, run.config, summary)
    stages.begin(REPORT)
    write_report(run.directory, "Quickstart: a draft for a tiny target", summary)
    return summary


def highlights(summary: dict[str, Any], output: Path) -> dict[str, Any]:
    """Return the figures that the command prints at its end, selected from the summary."""
    lengths = {
        "untrained draft": "acceptance_length_before",
        "prompt lookup": "acceptance_length_prompt_lookup",
        "bigram draft": "acceptance_length_bigram",
        "trained draft": "acceptance_length",
    }
    return {
        **{f"acceptance length, {name}": round(summary[key], 2) for name, key in lengths.items()},
        f"speed-up with the trained draft, {_texts(summary)} at a time": round(summary["speedup"], 2),
        **_one_at_a_time(summary),
        "greedy output equal to plain decoding": summary["outputs_equal"],
        "draft": str(output / "draft"),
        "report": str(output / "report.html"),
    }


def _texts(summary: dict[str, Any]) -> str:
    return counted(summary["concurrency"], "text") if "concurrency" in summary else "many texts"


def _one_at_a_time(summary: dict[str, Any]) -> dict[str, float]:
    """Return the speed-up if one text is decoded at a time, with the run's number of draft tokens.

    Return an empty dict if it was not measured.
    """
    found = [
        row["speedup"]
        for row in summary.get("speeds", ())
        if (row["concurrency"], row["num_draft_tokens"]) == (1, summary["num_draft_tokens"])
    ]
    return {"speed-up with the trained draft, one text at a time": round(found[0], 2)} if found else {}


def prepare_files(
    size: QuickstartSize, stages: Stages | None = None, device: torch.device = CPU
) -> QuickstartFiles:
    """Return the tiny target and its data from the cache; create them if the cache lacks them.

    They are created on ``device``, which takes minutes on a CPU.
    """
    stages = stages or Stages()
    stages.begin(READ)
    config = size.target
    documents = python_documents(size.library)
    train, held_out = split_by_file(documents, HELD_OUT_SHARE, seed=0)
    key = f"{tiny_target_cache_key(train, config)}-{PIECE_CHARS}-{HELD_OUT_ROWS}"
    files = QuickstartFiles(cache_folder() / f"quickstart-{key}")
    if not files.folder.exists():
        check_writable(files.folder, "cache (XDG_CACHE_HOME sets another)")
    files.folder.mkdir(parents=True, exist_ok=True)
    _write_rows(files.train, _rows(train))
    _write_rows(files.held_out, _evenly(_rows(held_out), HELD_OUT_ROWS))
    if not files.target.exists():
        stages.begin(TARGET)
        log.info("the target will be in %s", files.folder)
        build_tiny_target(files.target, train, config, device, functools.partial(_show_progress, stages))
    return files


def _measure_all(run: RunSpec, prompts: Prompts, sampling: SamplingParams) -> dict[str, Any]:
    """Measure the trained draft's speed and acceptance length, and the baselines' acceptance lengths."""
    untrained = export_untrained(run.draft, run.target, run.directory.root / "untrained_draft")
    with one_thread(), engine_output_kept(run.engine_type), create_engine(run, run.target) as engine:
        work = Workload(prompts=prompts, sampling=sampling)
        plain = decode_without_draft(engine, work)
        drafted = decode_with_draft(engine, run.directory.draft, work)
        result = summarise(work, plain, drafted)
        if run.engine_type.abilities.in_process:  # other engines start again for every number of draft tokens
            log.info("timing the draft with other numbers of draft tokens")
            result["speeds"] = speeds(engine, prompts, sampling, run.draft.max_draft_tokens)
            text_of = Encoder(run.target.folder, run.target.vocab_size).decode
            result |= texts_and_topics(prompts, (drafted.sampled or drafted.greedy).answers, text_of)
        few = Workload(prompts=prompts[::2], sampling=_shortened(sampling))
        before = decode_once_with(engine, untrained, few, "an untrained draft")
        result["acceptance_length_before"] = before.counters.acceptance_length
    return {**result, **_measure_baselines(run, few.prompts, few.sampling)}


def _shortened(sampling: SamplingParams) -> SamplingParams:
    most = min(sampling.max_new_tokens, COMPARED_TOKENS)
    return replace(sampling, max_new_tokens=most, concurrency=None)


def _measure_baselines(run: RunSpec, prompts: Prompts, sampling: SamplingParams) -> dict[str, float]:
    """Measure the acceptance length of the two baselines that use only tokens, with the default engine.

    The default engine can decode with any Proposer.
    """
    from spec_trainer.cli.quickstart.baselines import BigramModel, BigramProposer, PromptLookupProposer

    bigram = BigramModel((sample.input_ids.tolist() for sample in run.dataset.train), run.target.vocab_size)
    proposers = {"bigram": lambda: BigramProposer(bigram), "prompt_lookup": PromptLookupProposer}
    results: dict[str, float] = {}
    engine_type = plugins.load_available(Engine, DEFAULT_PLUGINS["engine"])
    reference = EngineOptions(
        EngineSections(engine=engine_type.Config(name=engine_type.name)), run.backend, engine_type
    )
    with one_thread(), create_engine(reference, run.target) as engine:
        for name, proposer in proposers.items():
            engine.use_proposer(proposer)
            decoded = decode(engine, prompts, sampling)
            results[f"acceptance_length_{name}"] = decoded.counters.acceptance_length
    return results


def held_out_prompts(run: RunSpec, num_prompts: int) -> Prompts:
    """Return the first ``PROMPT_TOKENS`` tokens of held-out rows as prompts."""
    long_enough = [sample for sample in run.dataset.held_out if len(sample) >= PROMPT_TOKENS]
    return [sample.input_ids[:PROMPT_TOKENS].tolist() for sample in _evenly(long_enough, num_prompts)]


def _link(link: Path, folder: Path) -> None:
    """Create or replace a symbolic link to ``folder``."""
    link.unlink(missing_ok=True)
    link.symlink_to(folder.resolve(), target_is_directory=True)


def _write_rows(file: Path, rows: Sequence[dict[str, str]]) -> None:
    if not file.exists():
        write_atomically(file, "".join(json.dumps(row) + "\n" for row in rows))


def _rows(documents: Sequence[Document]) -> list[dict[str, str]]:
    return [{"text": piece} for document in documents for piece in _pieces(document.text)]


def _evenly(items: Sequence[T], num: int) -> list[T]:
    """Return at most ``num`` of the items, at even distances."""
    return [items[index * len(items) // num] for index in range(num)] if len(items) > num else list(items)


def _pieces(text: str) -> Iterator[str]:
    """Cut a document at line ends into pieces of a few hundred tokens, so that no sample is truncated."""
    piece: list[str] = []
    size = 0
    for line in text.splitlines(keepends=True):
        if piece and size + len(line) > PIECE_CHARS:
            yield "".join(piece)
            piece = []
            size = 0
        piece.append(line)
        size += len(line)
    if size >= MIN_CHARS:
        yield "".join(piece)


def _show_progress(stages: Stages, step: int, num_steps: int, loss: torch.Tensor) -> None:
    if step % 30 == 0 or step == num_steps:  # reading the loss waits for the device
        stages.show(step / num_steps, f"step {step}/{num_steps}, loss {loss.item():.2f} nats per token")
