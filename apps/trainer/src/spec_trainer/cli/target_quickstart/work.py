"""Work is a checked request of the quickstart: target, machine and plugins, as the stages need them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from spec_core import Draft, TargetSpec
from spec_core.plugins import load_available
from spec_trainer.base.hub import resolve_target
from spec_trainer.cli.target_quickstart.budget import COST, PROMPTS, STARTS_S, TRAINING
from spec_trainer.cli.target_quickstart.engine import Chosen, choose_engine, engine_without_start
from spec_trainer.cli.target_quickstart.folder import QuickstartFolder
from spec_trainer.cli.target_quickstart.prompts import check_source
from spec_trainer.cli.target_quickstart.recipe import (
    Lengths,
    Machine,
    lengths,
    look_at_machine,
)
from spec_trainer.cli.target_quickstart.request import TargetQuickstart
from spec_trainer.configuration.engine_options import EngineOptions
from spec_trainer.data.sources import check_apart
from spec_trainer.data.tokens import Encoder

_LONG_S = 1800.0
"""Budget from which the training may start an engine with processes of its own: then its starts take at most a
fifth of the training's time."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """A checked request of the quickstart."""

    request: TargetQuickstart
    target: TargetSpec
    machine: Machine
    draft_type: type[Draft]
    options: EngineOptions
    engine_words: tuple[str, ...]
    """``engine.key=value`` arguments of every command that starts the engine."""
    without_start: Chosen | None
    """An engine that runs in the trainer's process, if the one that answers starts slowly."""
    encoder: Encoder

    @cached_property
    def folder(self) -> QuickstartFolder:
        """The files of the quickstart."""
        return QuickstartFolder(self.request.folder)

    @property
    def engine(self) -> str:
        """The name of the engine."""
        return self.options.config.engine.name

    @property
    def starts_slowly(self) -> bool:
        """Whether the engine is a program of its own on an accelerator, where it compiles kernels as it starts."""
        return _starts_slowly(self.machine, self.options)

    def training_engine(self, budget_s: float) -> Chosen:
        """Return the engine whose features a round trains on.

        An engine with processes of its own captures faster than one in the trainer's process, but the training
        starts it twice. In a short round that takes longer than it saves.
        """
        if self.without_start is None or budget_s >= _LONG_S:
            return self.options, self.engine_words
        return self.without_start

    def slow_starts(self, budget_s: float) -> tuple[str, ...]:
        """Return the stages of a round that wait for an engine that takes long to start, and does not run yet."""
        if not self.starts_slowly:
            return ()
        options, _ = self.training_engine(budget_s)
        trains_at_once = not _starts_slowly(self.machine, options)
        runs_already = COST if self.request.data is None else PROMPTS
        return tuple(
            name for name in STARTS_S if name != runs_already and not (name == TRAINING and trains_at_once)
        )

    @property
    def lengths(self) -> Lengths:
        """The lengths of prompts and answers."""
        return lengths(self.target, self.machine)

    @property
    def settings(self) -> dict[str, Any]:
        """The values that all calls with the same output must have in common."""
        request = self.request
        return {
            "target": self.target.digest,
            "data": request.data,
            "draft": request.draft,
            "engine": self.engine,
            "training engine": self.training_engine(0.0)[0].config.engine.name,
            "backend": self.machine.backend,
            "seed": request.seed,
        }


def _starts_slowly(machine: Machine, options: EngineOptions) -> bool:
    return not (machine.is_cpu or options.engine_type.abilities.in_process)


def check_request(request: TargetQuickstart) -> Work:
    """Return the Work of a request. Raise UsageError, one line, if something is wrong; create nothing."""
    from spec_kit.targets import read_target
    from spec_kit.targets.target_reader import check_target_tensors

    machine = look_at_machine(request.backend)
    draft_type = load_available(Draft, request.draft)
    target = read_target(resolve_target(request.target))
    draft = draft_type(draft_type.Config(name=request.draft))
    draft.check_target(target)
    check_target_tensors(target, draft.target_tensors(target))
    options, words = choose_engine(request.engine, machine, target, draft)
    slow = _starts_slowly(machine, options)
    work = Work(
        request=request,
        target=target,
        machine=machine,
        draft_type=draft_type,
        options=options,
        engine_words=words,
        without_start=engine_without_start(machine, target, draft) if slow else None,
        encoder=Encoder(target.folder, target.vocab_size, options.config.data),
    )
    check_source(work)
    if request.data is not None:
        check_apart(request.data, request.folder)
    work.folder.check(work.settings)
    return work
