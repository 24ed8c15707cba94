"""RunSpec: everything that a run is, read, loaded and checked."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import chain
from math import ceil
from typing import TYPE_CHECKING

from spec_core.errors import ConfigError
from spec_core.launcher import LaunchContext
from spec_trainer.data.prompts import serving_prompts
from spec_trainer.draft_folder import CHAIN_TOKENS
from spec_trainer.placement.members import members, most_on_a_device, on_hosts, with_fewer_ranks
from spec_trainer.run.batch_schedule import BatchSchedule, BatchSettings
from spec_trainer.run.directory import RunDirectory, run_identity
from spec_trainer.run.dispatch import sample_bytes

if TYPE_CHECKING:
    from spec_core import Backend, Draft, Engine, Launcher, Optimizer, Strategy, TargetSpec
    from spec_core.records import FeatureSchema
    from spec_trainer.config import AnyRunConfig
    from spec_trainer.data.dataset import Dataset
    from spec_trainer.placement.members import Member

_WINDOW_SHARES = 16
"""Most steps that engines may be ahead of a rank, by default; a rank's share of a step is hundreds of megabytes."""


def decoded_steps(config: AnyRunConfig, num_prompts: int) -> int:
    """Return the steps of a run that decodes: ``train.steps``, or ``train.epochs`` passes over the prompts."""
    cycles = ceil(config.train.epochs * num_prompts / config.decode.prompts)
    return config.train.steps or cycles * config.decode.every


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """Everything that the configuration names but the data, loaded and checked."""

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
        """Tokens that the draft proposes per round where the run decodes."""
        return self.config.decode.num_draft_tokens or self.draft.max_draft_tokens or CHAIN_TOKENS

    @property
    def longest_prompt(self) -> int:
        """Most tokens of a prompt of a run that decodes, beside its answer; less than 1 where there is no room."""
        positions = self.target.max_positions - self.num_draft_tokens - 1
        room = min(positions, self.config.engine.batch_tokens) - self.config.decode.max_new_tokens
        return min(room, self.config.data.max_length)

    def with_dataset(self, dataset: Dataset) -> RunSpec:
        """Return the run that trains on ``dataset``."""
        settings = BatchSettings.from_config(self.config, self.strategy_type)
        if self.config.decode.every:
            settings = replace(settings, total_steps=decoded_steps(self.config, len(dataset.train)))
        return self.with_schedule(BatchSchedule(dataset, settings))

    def with_schedule(self, schedule: BatchSchedule) -> RunSpec:
        """Return the run that does what ``schedule`` says."""
        parts = {part.name: getattr(self, part.name) for part in fields(RunParts)}
        return RunSpec(**parts, schedule=schedule)


@dataclass(frozen=True, kw_only=True)
class RunSpec(RunParts):
    """Everything that a run is, on this machine."""

    schedule: BatchSchedule
    prompts: Dataset | None = None
    """The data of a run that decodes, in one of its cycles; the samples of the schedule are answers then."""

    @property
    def dataset(self) -> Dataset:
        """The samples that the schedule is made of."""
        return self.schedule.dataset

    @property
    def source(self) -> Dataset:
        """The data that the user has given."""
        return self.prompts or self.dataset

    @cached_property
    def serving_prompts(self) -> list[list[int]]:
        """The held-out prompts by which the draft is measured (``train.serve_every``)."""
        return serving_prompts(self.dataset, self.longest_prompt, self.config.decode.prompts)

    def cycle(self, answers: Dataset, steps: range) -> RunSpec:
        """Return the run in one of its cycles: it trains ``steps`` on ``answers``."""
        schedule = BatchSchedule(answers, self.schedule.settings, steps)
        return replace(self, schedule=schedule, prompts=self.source)

    def resuming(self, checkpoint: str) -> RunSpec:
        """Return the same run with another ``train.resume_from``."""
        train = self.config.train.model_copy(update={"resume_from": checkpoint})
        return replace(self, config=self.config.model_copy(update={"train": train}))

    def with_room(self) -> RunSpec:
        """Return the same run with as many trainer ranks as there is room for now, at least one.

        There is room where no device has more processes than one of those that this run was to have.
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
        """The run directory, ``output``."""
        return RunDirectory(self.config.output)

    @cached_property
    def identity(self) -> str:
        """Digest of everything that makes two runs the same (``run_identity``)."""
        return run_identity(self.config, self.source.digest, self.target.digest)

    @cached_property
    def window_bytes(self) -> int:
        """Bytes of features in flight for each trainer process.

        ``placement.window_bytes``, or room for two global batches, so that one is captured while one trains. Where
        many ranks share a global batch, ``_WINDOW_SHARES`` of a rank's shares are enough.
        """
        if self.config.placement.window_bytes is not None:
            return self.config.placement.window_bytes
        batch, longest = self.config.train.global_batch_tokens, self.longest_sample
        return sample_bytes(
            self.schema,
            max(2 * longest, min(2 * batch, ceil(_WINDOW_SHARES * batch / self.schedule.num_shares))),
        )

    @cached_property
    def longest_sample(self) -> int:
        """Most tokens of a sample; of a prompt with its answer in a run that decodes."""
        prompts = [len(sample.prompt) for sample in self.source.samples if sample.prompt is not None]
        if prompts:
            return max(prompts) + self.config.decode.max_new_tokens
        return max(self.dataset.lengths.values())

    def members(self) -> list[Member]:
        """Return the processes of the run; none inline. Raise ConfigError where their devices cannot hold them."""
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
        """Return the launcher of the run, which has started nothing."""
        context = LaunchContext(
            backend=self.backend,
            logs=self.directory.logs,
            placement=self.config.placement.kind,
            peer_s=self.config.timeouts.peer_s,
        )
        return self.launcher_type(self.config.launcher, context)
