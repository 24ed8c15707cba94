"""Build the objects of a resolved run and connect them, in one process or several."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from spec_core import EngineContext, plugins
from spec_core.errors import ArtifactError
from spec_trainer.base.waiting import Waiting
from spec_trainer.report.page import write_report
from spec_trainer.run.draft_trainer import DraftTrainer
from spec_trainer.run.few_steps import few_steps_warning
from spec_trainer.run.log import RunLog
from spec_trainer.run.metrics import read_metrics
from spec_trainer.run.model_card import write_run_card
from spec_trainer.run.records import KeptSummary, read_figures
from spec_trainer.run.serving import serving_commands
from spec_trainer.run.timer import Timer
from spec_trainer.training.checkpoint.store import CheckpointStore
from spec_trainer.training.loop import TrainState, train
from spec_trainer.training.profiling import StepProfiler

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import nn
    from torch.distributed import Store

    from spec_core import Engine, Strategy, TargetSpec, TargetTensors, Transport
    from spec_core.records import FeatureSchema
    from spec_trainer.configuration.engine_options import EngineOptions
    from spec_trainer.push.live_measurements import Measure
    from spec_trainer.run.feature_stream import BatchSource
    from spec_trainer.run.spec import RunParts, RunSpec


_MEASURED = (
    "serving_acceptance_length",
    "serving_acceptance_length_per_request",
    "serving_acceptance_per_position",
    "serving_tokens_per_s",
)
"""Fields of a step's record whose last values are copied to the summary."""


@dataclass(frozen=True, kw_only=True)
class RankLinks:
    """Functions by which a trainer rank communicates with the rest of the run."""

    store: Store
    """Key-value store by which the ranks form torch's default process group."""
    stream: BatchSource
    work: Callable[[int, Callable[[], object]], object]
    """Called with the steps done and a function that trains, once the rank has loaded everything. It calls the
    function when features may arrive, and waits until no other process needs this rank."""
    should_stop: Callable[[int], bool]
    """Called after every step with the steps done; returns the same on every rank."""
    show: Callable[[dict[str, Any]], None]
    """Called with rank 0's record of each step, for the progress display."""
    measure: Measure | None = None
    """Lets the run's engine measure a draft; only on rank 0, with ``train.serve_every``."""
    trained: Callable[[dict[str, Any]], None] | None = None
    """Called with each step's sample ids if the rank cannot access the run directory; None if it can."""
    notes: Callable[[], dict[str, Any]] = dict
    """Returns fields for the record of each step, such as which draft the run's engine serves."""
    timer: Timer | None = None
    """Timer that all cycles of a run that decodes share; None otherwise."""
    result: dict[str, Any] = field(default_factory=dict[str, Any])
    """Result of a task when its work is done (``RankTask``); JSON-serializable."""


Consume = Callable[["RunSpec", int, "torch.device", RankLinks], object]
"""Called with a run (or one of its cycles), rank, device and links; consumes the rank's batches.

It is ``train_rank``, the writer of a capture, or a ``RankTask``."""


def create_engine(parts: RunParts | EngineOptions, target: TargetSpec, **around: Any) -> Engine:
    """Return the engine that the configuration names. ``around``: further fields of the EngineContext.

    Without the field ``placement`` the engine can generate, but not capture.
    """
    timeouts = parts.config.timeouts
    context = EngineContext(backend=parts.backend, start_s=timeouts.start_s, peer_s=timeouts.peer_s, **around)
    with Waiting(f"starting engine {parts.config.engine.name}"):
        return parts.engine_type.create(parts.config.engine, target, context)


def start_engine(engine: Engine, target: TargetSpec, schema: FeatureSchema) -> None:
    """Start the engine for captures. Raise TargetError if its embedding or head is not the trainer's."""
    from spec_kit.targets import check_same_weights

    engine.start(schema)
    check_same_weights(engine, target)


@dataclass(frozen=True, kw_only=True)
class RankFeatures:
    """A trainer rank's source of features, which stays open during all cycles of a run."""

    stream: Callable[[RunSpec, Callable[..., None]], BatchSource]
    """Returns the rank's batches for a run or one of its cycles. The second argument is a callback that gets the rank
    and the request ids of samples whose transport memory is free."""
    address: str = ""
    """Address at which the rank receives features; empty if they come from a folder."""


@contextmanager
def rank_features(
    spec: RunSpec, rank: int, device: torch.device, host: str = "", transport: Transport | None = None
) -> Iterator[RankFeatures]:
    """Yield the source of a rank's features: a transport's receiver, or the folder ``data.features``.

    ``host``: address of this host for engines on other hosts, empty if there are none. ``transport``: the engine's
    transport, if the engine is in this process.
    """
    if spec.config.data.features is not None:
        from spec_trainer.offline.store import open_features
        from spec_trainer.offline.stream import StoredStream

        with StoredStream(spec, rank, open_features(spec), device) as stored:
            yield RankFeatures(stream=lambda part, released: stored)
        return
    from spec_trainer.run.feature_stream import FeatureStream

    transport = transport or spec.backend.transport(spec.config.placement.kind)
    sent = spec.schema.sent
    batches = sent if spec.stores else spec.schema
    with transport.listen(sent, spec.window_bytes, host) as receiver:
        yield RankFeatures(
            stream=lambda part, released: FeatureStream(
                part.schedule, rank, receiver, batches, part.config, device, released
            ),
            address=receiver.address,
        )


def train_rank(spec: RunSpec, rank: int, device: torch.device, links: RankLinks) -> None:
    """Train the remaining steps of ``spec`` as trainer rank ``rank``; at the run's end export the draft."""
    with _train_state(spec, rank, device, links) as state:
        links.work(state.done_steps, functools.partial(_train_and_finish, state))


@contextmanager
def _train_state(spec: RunSpec, rank: int, device: torch.device, links: RankLinks) -> Iterator[TrainState]:
    """Yield a trainer rank's TrainState, resumed from the checkpoint that ``run_training`` chose."""
    import torch.distributed as dist

    from spec_trainer.push.live_measurements import LiveMeasurements
    from spec_trainer.push.live_pushes import LivePushes

    with ExitStack() as stack:
        stack.enter_context(default_group(spec, rank, device, links.store))
        strategy = stack.enter_context(
            spec.strategy_type(spec.config.strategy, spec.config.train, spec.optimizer, device)
        )
        trainer = build_trainer(spec, rank, strategy)
        checkpoints = CheckpointStore(
            spec.directory.checkpoints, spec.config.train.keep, dist.group.WORLD, sees=links.trained is None
        )
        done_steps = spec.start_step
        if done_steps:
            checkpoints.load(trainer, spec.directory.checkpoints / f"step-{done_steps}")
        yield TrainState(
            spec=spec,
            rank=rank,
            device=device,
            trainer=trainer,
            stream=links.stream,
            checkpoints=checkpoints,
            log=stack.enter_context(RunLog(spec, rank, links.show, links.trained)),
            should_stop=links.should_stop,
            profiler=StepProfiler(spec.config.profile.steps if rank == 0 else (), spec.directory.root),
            pushes=stack.enter_context(LivePushes(spec, rank, device, dist.group.WORLD)),
            measurements=LiveMeasurements(spec, links.measure),
            done_steps=done_steps,
            best=checkpoints.best_score(done_steps),
            notes=links.notes,
            timer=links.timer or Timer(),
        )


def build_trainer(spec: RunSpec, rank: int, strategy: Strategy) -> DraftTrainer:
    """Return a DraftTrainer of a new draft with the run's initial weights, for trainer rank ``rank``."""
    from spec_kit.targets.target_reader import read_target_tensors

    tensors = read_target_tensors(spec.target)
    module = new_module(spec, tensors)
    strategy.attach(module, spec.draft.shard_hints(spec.target))
    ops = strategy.vocabulary_ops(spec.target, tensors)
    if spec.config.train.fp8 is not None:
        from spec_kit.layers import use_fp8_head

        use_fp8_head(ops, plugins.find_kernel(spec.backend))
    return DraftTrainer(spec.draft, strategy, ops, rank)


def new_module(spec: RunSpec, tensors: TargetTensors) -> nn.Module:
    """Return the draft's module with the run's initial weights; seed this process's random generators."""
    import torch

    from spec_kit.drafting import build_module

    # Every rank draws the same initial weights; afterwards each has its own generator.
    torch.manual_seed(spec.config.seed)
    random.seed(spec.config.seed)
    counts = torch.from_numpy(spec.source.token_counts(spec.target.vocab_size))
    find = plugins.find_kernel(spec.backend)
    if spec.config.train.fp8 != "layers":
        return build_module(spec.draft, spec.target, tensors, counts, find)
    from spec_kit.layers import Fp8Layers

    layers = Fp8Layers(find)
    module = build_module(spec.draft, spec.target, tensors, counts, layers.find)
    layers.attach(module)
    return module


@contextmanager
def default_group(spec: RunSpec, rank: int, device: torch.device, store: Store) -> Iterator[None]:
    """Join torch's default process group, which consists of the trainer ranks, for the ``with`` block."""
    import torch
    import torch.distributed as dist

    from spec_kit.collectives.gloo_members import prove_default_group
    from spec_kit.collectives.gloo_ports import closed_afterwards

    with closed_afterwards():
        dist.init_process_group(
            spec.backend.dist_backend,
            store=store,
            rank=rank,
            world_size=spec.config.train.ranks,
            # A rank may wait for another that waits for features; the controller watches who is alive.
            timeout=timedelta(seconds=spec.config.timeouts.step_s),
        )
        prove_default_group(store, spec.config.timeouts.start_s)
    try:
        if spec.config.train.ranks > 1:
            # torch connects devices in a group's first call, and HCCL connects one group of a process at a time:
            # do it now, before engines connect to this rank.
            dist.all_reduce(torch.zeros(1, device=device))
        yield
    finally:
        dist.destroy_process_group()


def _train_and_finish(state: TrainState) -> None:
    last = train(state)
    if state.done_steps == state.spec.schedule.total_steps:
        _finish(state, last)


def _finish(state: TrainState, last: dict[str, Any]) -> None:
    """Export the trained draft; on rank 0, write summary and report."""
    directory = state.spec.directory
    directory.check_still_owned(state.spec.identity)
    with state.timer("export"):
        state.trainer.export(state.spec.target, directory.draft, state.spec.config.data)
    if state.rank != 0:
        return
    summary = _summary(state, last) | ({} if last else _kept_summary(state))
    if failed := state.log.close_trackers():
        summary["trackers_failed"] = failed
    directory.write_summary(summary)
    write_run_card(directory.draft, state.spec.draft, state.spec.target, state.spec.config, summary)
    if pushed := state.pushes.finish():
        summary["last_pushes"] = pushed
        directory.write_summary(summary)
    write_report(directory, f"Training of {summary['description']}", summary)


def _kept_summary(state: TrainState) -> dict[str, Any]:
    """Return figures of the existing summary if the run was already complete, otherwise none."""
    try:
        saved = read_figures(state.spec.directory.summary, KeptSummary)
    except ArtifactError:  # there is none, or it is damaged
        return {}
    return saved if saved.get("steps") == state.done_steps else {}


def _summary(state: TrainState, last: dict[str, Any]) -> dict[str, Any]:
    directory = state.spec.directory
    last = last or next(reversed(read_metrics(directory.metrics)), {})
    return {
        "description": f"{state.spec.config.draft.name} draft for {state.spec.target.folder.name}",
        "seed": state.spec.config.seed,
        "changed": state.spec.resuming("latest").config.model_dump(mode="json", exclude_defaults=True),
        "steps": state.done_steps,
        "tokens": _trained_tokens(state),
        **{key: value for key, value in last.items() if key == "loss" or key.startswith("eval_")},
        "simulated_acceptance_length": last.get("acceptance_length"),
        **_measured(state, last),
        "wall_s": state.timer.wall_s,
        "time_s": state.timer.breakdown(),
        "draft": str(directory.draft),
        "serve": serving_commands(
            state.spec.target,
            state.spec.draft,
            directory.draft,
            state.spec.num_draft_tokens,
            state.spec.config.engine,
        ),
        "data": str(state.spec.source.report),
        "samples": state.spec.source.report.counts(),
        "warnings": [
            *filter(None, [few_steps_warning(state.spec.config.train, state.spec.schedule.total_steps)])
        ],
        **_device_name(state.device),
    }


def _device_name(device: torch.device) -> dict[str, str]:
    """Return the name of the hardware under the key ``device``, or an empty dict for a CPU."""
    import torch

    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return {} if name is None else {"device": name(device)}


def _measured(state: TrainState, last: dict[str, Any]) -> dict[str, Any]:
    """Return the figures that the run's engine measured with the draft of the last step.

    It measures drafts only with ``train.serve_every``.
    """
    if not state.spec.config.train.serve_every:
        return {}
    return {key.removeprefix("serving_"): value for key, value in last.items() if key in _MEASURED}


def _trained_tokens(state: TrainState) -> int:
    """Return the number of tokens of all steps of the run, including steps before a resume."""
    if state.spec.prompts is not None:  # each cycle has answers of its own
        return sum(record.get("tokens", 0) for record in read_metrics(state.spec.directory.metrics))
    lengths = state.spec.dataset.lengths
    items = map(state.spec.schedule.train_item, range(state.done_steps))
    return sum(lengths[sample_id] for item in items for sample_id in item.sample_ids)
