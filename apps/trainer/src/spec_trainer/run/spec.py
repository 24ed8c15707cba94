"""RunSpec is a run's configuration, plugins, target, data and schedule, loaded and checked."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import chain
from math import ceil
from typing import Any

from spec_core import (
    Backend,
    Draft,
    DraftCost,
    Engine,
    LaunchContext,
    Launcher,
    Optimizer,
    Strategy,
    TargetSpec,
)
from spec_core.errors import ConfigError
from spec_core.plugin_faults import checked_answer
from spec_core.records import FeatureSchema
from spec_trainer.configuration.run import AnyRunConfig
from spec_trainer.data.dataset import Dataset
from spec_trainer.data.prompts import serving_prompts
from spec_trainer.run.batch_schedule import BatchSchedule, BatchSettings
from spec_trainer.run.directory import RunDirectory, run_identity
from spec_trainer.run.dispatch import sample_bytes
from spec_trainer.run.members import Member, members, most_on_a_device, on_hosts, with_fewer_ranks

_NEVER = 1 << 40
"""Number of steps of a run that follows live requests: never reached, because the run goes on until
stopped."""
_WINDOW_SHARES = 16
"""Largest number of steps for which a rank's window has space by default. The features of one step of a rank
take hundreds of MB."""


def decoded_steps(config: AnyRunConfig, num_prompts: int) -> int:
    """Return the number of steps of a run with ``decode.every``.

    It is ``train.steps``, or as many as ``train.epochs`` passes over the prompts take.
    """
    cycles = ceil(config.train.epochs * num_prompts / config.decode.prompts)
    return config.train.steps or cycles * config.decode.every


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """A run without its data: the configuration, and the loaded plugins and target that it names."""

    config: AnyRunConfig
    backend: Backend
    draft: Draft
    engine_type: type[Engine]
    optimizer: Optimizer
    strategy_type: type[Strategy]
    launcher_type: type[Launcher]
    target: TargetSpec
    schema: FeatureSchema

    @property
    def num_draft_tokens(self) -> int:
        """Number of tokens that the draft proposes per round when the run's engine decodes."""
        return self.config.decode.num_draft_tokens or self.draft.default_draft_tokens

    @property
    def longest_prompt(self) -> int:
        """Largest number of tokens of a prompt that the run's engine can answer.

        It is less than 1 if the answer alone may need all tokens.
        """
        positions = self.target.max_positions - self.num_draft_tokens - 1
        room = min(positions, self.config.engine.batch_tokens) - self.config.decode.max_new_tokens
        return min(room, self.config.data.max_length)

    @cached_property
    def draft_cost(self) -> DraftCost:
        """The costs of training the draft for the target."""
        return checked_answer(self.draft.cost(self.target), DraftCost, self.draft, "cost")

    def with_dataset(self, dataset: Dataset) -> RunSpec:
        """Return the RunSpec of this run with ``dataset`` as its data, and with the schedule for it."""
        settings = BatchSettings.from_config(self.config, self.strategy_type)
        if self.config.decode.every:
            settings = replace(settings, total_steps=decoded_steps(self.config, len(dataset.train)))
        if self.config.follow.servers:
            settings = replace(settings, total_steps=_NEVER)
        return self.with_schedule(BatchSchedule(dataset, settings, sample_flops=self.draft_cost.sample_flops))

    def with_schedule(self, schedule: BatchSchedule) -> RunSpec:
        """Return the RunSpec of this run with the global batches of ``schedule``."""
        parts = {part.name: getattr(self, part.name) for part in fields(RunParts)}
        return RunSpec(**parts, schedule=schedule)


@dataclass(frozen=True, kw_only=True)
class RunSpec(RunParts):
    """A complete run: configuration, plugins, target and the schedule over its data."""

    schedule: BatchSchedule
    prompts: Dataset | None = None
    """The user's data, if this RunSpec is a cycle of a run that decodes; else None. The samples of a cycle's
    schedule are generated answers."""
    stores: bool = False
    """Whether its steps store features as they are sent, instead of training (``CaptureRun``)."""

    @property
    def dataset(self) -> Dataset:
        """The samples that the schedule trains on."""
        return self.schedule.dataset

    @property
    def source(self) -> Dataset:
        """The data that the user gave, also if this RunSpec is a cycle that trains on generated answers."""
        return self.prompts or self.dataset

    @cached_property
    def serving_prompts(self) -> list[list[int]]:
        """Token ids of the held-out prompts with which the draft is measured (``train.serve_every``)."""
        return serving_prompts(self.dataset, self.longest_prompt, self.config.decode.prompts)

    def cycle(self, answers: Dataset, steps: range, **settings: Any) -> RunSpec:
        """Return one cycle of the run as a RunSpec, which trains on ``answers`` in the steps ``steps``.

        ``settings``: fields of BatchSettings whose values differ from the run's.
        """
        changed = replace(self.schedule.settings, **settings)
        schedule = BatchSchedule(answers, changed, steps, self.draft_cost.sample_flops)
        return replace(self, schedule=schedule, prompts=self.source)

    def resuming(self, checkpoint: str) -> RunSpec:
        """Return the same run with another ``train.resume_from``."""
        train = self.config.train.model_copy(update={"resume_from": checkpoint})
        return replace(self, config=self.config.model_copy(update={"train": train}))

    def starting_at(self, step: int) -> RunSpec:
        """Return the same run, starting from the checkpoint of ``step``, or from initial weights at step 0."""
        return self.resuming(f"step-{step}")

    @property
    def start_step(self) -> int:
        """Number of steps of the checkpoint that the run starts from; 0 if none was chosen."""
        kind, _, step = self.config.train.resume_from.partition("-")
        return int(step) if kind == "step" else 0

    def with_accumulation(self, passes: int) -> RunSpec:
        """Return the same run with ``passes`` micro-batches in each step of a rank."""
        train = self.config.train.model_copy(update={"accumulation": passes})
        return replace(self, config=self.config.model_copy(update={"train": train})).with_dataset(
            self.dataset
        )

    def with_room(self) -> RunSpec:
        """Return the run with as many trainer ranks as the devices available now allow, but at least one.

        No device gets more processes than the fullest device of this run has.
        """
        shared = Counter(device for member in self.members() for device in member.devices)
        with self.launcher() as launcher:
            num_devices = launcher.num_devices()
        fewer = [with_fewer_ranks(self.config, ranks) for ranks in range(self.config.train.ranks, 0, -1)]
        fitting = (one for one in fewer if most_on_a_device(one, num_devices) <= max(shared.values()))
        for config in chain(fitting, reversed(fewer)):
            with suppress(ConfigError):  # a strategy may not take every number
                return replace(self, config=config).with_dataset(self.dataset)
        return self

    @cached_property
    def directory(self) -> RunDirectory:
        """The run directory, at the path ``output`` of the configuration."""
        return RunDirectory(self.config.output)

    @cached_property
    def identity(self) -> str:
        """The run's identity (``run_identity``): equal identities mean the same run."""
        is_fixed = self.config.follow.new_target == "stop"
        return run_identity(self.config, self.source.digest, self.target.digest if is_fixed else "")

    @cached_property
    def window_bytes(self) -> int:
        """Bytes of features in flight for each trainer process.

        The value is ``placement.window_bytes``, or by default the size of two global batches, so that one is
        captured while one trains. If many ranks share a global batch, a rank's shares of sixteen global
        batches (``_WINDOW_SHARES``) suffice. There is always space for two of the longest samples.
        """
        if self.config.placement.window_bytes is not None:
            return self.config.placement.window_bytes
        batch = self.config.train.global_batch_tokens
        longest = self.longest_sample
        return sample_bytes(
            self.schema,
            max(2 * longest, min(2 * batch, ceil(_WINDOW_SHARES * batch / self.schedule.num_shares))),
        )

    @cached_property
    def longest_sample(self) -> int:
        """Largest number of tokens of a sample, or of a prompt with its answer if the run's engine answers."""
        prompts = [len(sample.prompt) for sample in self.source.samples if sample.prompt is not None]
        if prompts:
            return max(prompts) + self.config.decode.max_new_tokens
        return max(self.dataset.lengths.values())

    def members(self) -> list[Member]:
        """Return the processes of the run, none if inline. Raise ConfigError if the devices cannot hold them."""
        return self._members

    @cached_property
    def _members(self) -> list[Member]:
        if self.config.placement.kind == "inline":
            return []
        window_bytes = self.window_bytes if self.config.data.features is None else 0
        with self.launcher() as launcher:
            capabilities = replace(self.backend.capabilities(), num_devices=launcher.num_devices())
            found = members(self.config, capabilities, window_bytes)
            workers = [member.worker for member in found]
            launcher.check(workers)
            return on_hosts(found, launcher.hosts(workers))

    def launcher(self) -> Launcher:
        """Return a new launcher of the run; it has started no process."""
        context = LaunchContext(
            backend=self.backend,
            logs=self.directory.logs,
            placement=self.config.placement.kind,
            peer_s=self.config.timeouts.peer_s,
        )
        return self.launcher_type(self.config.launcher, context)
