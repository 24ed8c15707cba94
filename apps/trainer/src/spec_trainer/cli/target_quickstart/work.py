"""Work is a checked request of the quickstart: target, machine and plugins, as the stages need them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from spec_core import Draft, TargetSpec
from spec_core.plugins import load_available
from spec_trainer.base.hub import resolve_target
from spec_trainer.cli.target_quickstart.engine import choose_engine
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
from spec_trainer.data.tokens import Encoder


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
        return not (self.machine.is_cpu or self.options.engine_type.abilities.in_process)

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
            "backend": self.machine.backend,
            "seed": request.seed,
        }


def check_request(request: TargetQuickstart) -> Work:
    """Return the Work of a request. Raise UsageError, one line, if something is wrong; create nothing."""
    from spec_kit.targets import check_target_tensors, read_target

    machine = look_at_machine(request.backend)
    draft_type = load_available(Draft, request.draft)
    target = read_target(resolve_target(request.target))
    draft = draft_type(draft_type.Config(name=request.draft))
    draft.check_target(target)
    check_target_tensors(target, draft.target_tensors(target))
    options, words = choose_engine(request.engine, machine, target, draft)
    work = Work(
        request=request,
        target=target,
        machine=machine,
        draft_type=draft_type,
        options=options,
        engine_words=words,
        encoder=Encoder(target.folder, target.vocab_size, options.config.data),
    )
    check_source(work.encoder, request.data)
    work.folder.check(work.settings)
    return work
