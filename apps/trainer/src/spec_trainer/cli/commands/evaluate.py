"""Run ``spec-trainer evaluate``: start the engine, measure a draft, and return the figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from spec_core import Draft, Engine, TargetSpec
from spec_trainer.base.disk import check_writable
from spec_trainer.cli.engine_output import engine_output_kept
from spec_trainer.data.tokens import Encoder
from spec_trainer.measure.evaluation.document import summarise
from spec_trainer.measure.evaluation.inputs import figures_by_input
from spec_trainer.measure.evaluation.measure import (
    Passes,
    ask_all,
    decode_once_with,
    decode_sweep,
    decode_with_draft,
    decode_without_draft,
)
from spec_trainer.measure.evaluation.prepare import prepare
from spec_trainer.measure.evaluation.request import EvaluationRequest
from spec_trainer.measure.evaluation.sweep import draft_tokens_by_load
from spec_trainer.measure.evaluation.workload import Workload
from spec_trainer.run.draft_trainer import export_draft
from spec_trainer.run.model_card import CARD, add_section, check_card, evaluation_section, write_card
from spec_trainer.run.serving import commands_by_load, serving_commands
from spec_trainer.training.wiring import create_engine


def evaluate_draft(
    request: EvaluationRequest, words: Sequence[str] = (), plain: Passes | None = None
) -> dict[str, Any]:
    """Return the document of ``evaluate --json``; ``words`` are arguments such as ``engine.key=value``.

    ``plain``: the passes without a draft, if an engine that reuses prefixes has decoded them.
    """
    evaluation = prepare(request, words)
    if request.card:
        check_writable(request.draft_folder, "draft folder")
        check_card(request.draft_folder)
    with TemporaryDirectory() as scratch:
        untrained = None
        if request.untrained:
            untrained = export_untrained(evaluation.draft, evaluation.target, Path(scratch) / "untrained")
        options = evaluation.options
        with (
            engine_output_kept(options.engine_type),
            create_engine(options, evaluation.target, reuse_prefixes=plain is not None) as engine,
        ):
            work = evaluation.work
            if evaluation.asked is not None:
                work = ask_all(engine, work, evaluation.asked)
            if request.by_length:
                work = work.by_length()
            figures = measure(engine, request.draft_folder, work, untrained, plain)
    served = (evaluation.target, evaluation.draft, request.draft_folder)
    serve = serving_commands(*served, figures["num_draft_tokens"], evaluation.options.config.engine)
    not_by_load = {}
    if len(by_load := draft_tokens_by_load(figures)) > 1:
        commands, not_by_load = commands_by_load(*served, by_load, serve)
        serve |= commands
    document = {
        "target": str(evaluation.target.folder),
        "draft": str(request.draft_folder),
        "engine": evaluation.options.engine_type.name,
        "engine_versions": dict(evaluation.options.engine_type.probe().versions),
        "backend": evaluation.options.backend.name,
        "seed": request.seed,
        "prompts": len(work.prompts),
        "chat_template_kwargs": evaluation.chat.chat_template_kwargs,
        **figures,
        "serve": serve,
        "not_by_load": not_by_load,
    }
    if request.card:
        if not (request.draft_folder / CARD).exists():
            draft_tokens = figures["num_draft_tokens"]
            write_card(request.draft_folder, evaluation.draft, evaluation.target, draft_tokens, {})
        add_section(request.draft_folder, "Evaluation", evaluation_section(document))
    return document


def measure(
    engine: Engine, draft_model: Path, work: Workload, untrained: Path | None, plain: Passes | None = None
) -> dict[str, Any]:
    """Return the figures of a draft (see ``summarise``), and the acceptance length of an untrained draft.

    ``untrained``: folder of the untrained draft; None if it is not measured. ``plain``: the passes without a draft,
    if they were decoded before.
    """
    plain = plain or decode_without_draft(engine, work)
    decode = None
    if any(number is not None for number in work.right):
        decode = Encoder(engine.target.folder, engine.target.vocab_size).decode
    swept = decode_sweep(engine, draft_model, work, plain)
    if swept is not None:
        work = work.with_draft_tokens(swept.best_fixed)
    loads = None if swept is None else swept.drafted[swept.best_fixed]
    drafted = decode_with_draft(engine, draft_model, work, loads)
    figures = summarise(work, plain, drafted, decode, swept)
    before = None
    if untrained is not None:
        before = decode_once_with(engine, untrained, work, "an untrained draft")
    return {
        "acceptance_length_before": before and before.counters.acceptance_length,
        **figures,
        "inputs": figures_by_input(work, plain, drafted, before),
    }


def export_untrained(draft: Draft, target: TargetSpec, folder: Path) -> Path:
    """Export an untrained draft of the same shape into ``folder``, and return the folder.

    The weights are random. A draft with ``init_from`` is built from that folder, because the options alone do
    not fix its shape; its weight matrices are then replaced by random ones.
    """
    import torch

    from spec_kit.drafting import build_module
    from spec_kit.layers import INIT_STD
    from spec_kit.targets.target_reader import read_target_tensors

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        module = build_module(draft, target, read_target_tensors(target))
        if draft.config.init_from is not None:
            for weights in module.parameters():
                if weights.dim() > 1:
                    weights.normal_(std=INIT_STD)
    export_draft(draft, module.state_dict(), target, folder)
    return folder
