"""Build shell commands that serve a draft, and the last lines of commands that train or measure it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from spec_core import Draft, Engine, EngineConfig, Serving, TargetSpec, foreign_errors
from spec_core.errors import ConfigError, PluginError, SpecError
from spec_core.plugins import availability, find, load, load_each
from spec_core.records import Availability

log = logging.getLogger(__name__)
T = TypeVar("T")


def serving_engines(target: TargetSpec, draft: Draft) -> dict[str, Availability | SpecError]:
    """Return what each engine that the draft names says about serving its exports for ``target``.

    An error: the engine's plugin is not installed, fails, or says that no version of the engine can serve them.
    """
    return {name: _offer(name, target, draft) for name in sorted(draft.serving_methods)}


def _offer(name: str, target: TargetSpec, draft: Draft) -> Availability | SpecError:
    try:
        serving = load(Engine, name).serving
        if serving is None:
            raise ConfigError(f"engine {name!r} has no program that serves drafts")
        failure = f"engine {name!r} ({find(Engine, name).owner}) fails to say what serves the draft"
        with foreign_errors(PluginError, failure):
            return _of_type(serving.availability(target, draft), Availability)
    except SpecError as error:
        return error


def _of_type(answer: object, expected: type[T]) -> T:
    """Return a plugin's answer. Raise TypeError if it has another type, which no type checker has seen."""
    if not isinstance(answer, expected):
        raise TypeError(f"it returned {type(answer).__name__}, expected {expected.__name__}")
    return answer


def unserved(target: TargetSpec, draft: Draft) -> str | None:
    """Return one line that says that no engine here serves the draft's exports, and which would; else None.

    If none of the engines that serve drafts of this kind is installed here, it is enough that a plugin here says
    which version of its engine would: such a machine only trains.
    """
    offers = serving_engines(target, draft)
    known = {name: offer for name, offer in offers.items() if not isinstance(offer, SpecError)}
    if any(offer.ok for offer in known.values()) or (known and not _has_programs(draft)):
        return None
    would = "".join(f". {name} would: {offer.reason}" for name, offer in known.items())
    others = "".join(f". {name}: {offer}" for name, offer in offers.items() if name not in known)
    named = "" if offers else ": it names no engine"
    return (
        f"no engine that is installed here serves draft {draft.name} with these options{named}{would}{others}"
    )


def check_serving(target: TargetSpec, draft: Draft) -> None:
    """Raise ConfigError if no engine that is installed here serves the draft's exports.

    If no engine that serves drafts of this kind is installed here, raise it only if no installed plugin names a
    version that would.
    """
    if problem := unserved(target, draft):
        raise ConfigError(f"{problem}. To train here and serve elsewhere: --serve-elsewhere")


def _has_programs(draft: Draft) -> bool:
    """Return whether the program of an engine that serves this kind of draft is installed, in whatever version."""
    for name in {*type(draft).serving_methods, *draft.serving_methods}:
        with suppress(PluginError):  # this plugin is not installed, or fails
            found = availability(Engine, name)
            if found.ok or found.versions:
                return True
    return False


def serving_commands(
    target: TargetSpec, draft: Draft, folder: Path, num_draft_tokens: int, own: EngineConfig | None = None
) -> dict[str, str]:
    """Return the shell command that serves the draft in ``folder``, for each engine that can serve it.

    An engine is included if its plugin is installed, even if the engine's program is not. ``own``: options of one of
    the engines, which its command names.
    """

    def command(serving: Serving, name: str) -> str:
        serving = serving if own is None or own.name != name else serving.configured(own)
        return serving.command(target, draft, folder, num_draft_tokens)

    answers = _commands(target, draft, folder, command)
    return {name: answer for name, answer in answers if isinstance(answer, str)}


def refusals(target: TargetSpec, draft: Draft, folder: Path) -> dict[str, SpecError]:
    """Return why engines do not accept the draft in ``folder``, by engine; those without a plugin are left out."""
    answers = _commands(target, draft, folder, lambda *_: "")
    return {name: answer for name, answer in answers if not isinstance(answer, str)}


def commands_by_load(
    target: TargetSpec, draft: Draft, folder: Path, draft_tokens: Mapping[int, int], serve: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return commands that change the number of draft tokens with the load, and why other engines do not.

    ``draft_tokens``: see ``Serving.command_by_load``. ``serve``: engine -> the command with one number; other
    engines are left out.
    """
    asked = _commands(
        target, draft, folder, lambda one, _: one.command_by_load(target, draft, folder, draft_tokens)
    )
    answers = {name: answer for name, answer in asked if name in serve}
    return (
        {name: answer for name, answer in answers.items() if isinstance(answer, str)},
        {name: str(answer) for name, answer in answers.items() if not isinstance(answer, str)},
    )


def _commands(
    target: TargetSpec, draft: Draft, folder: Path, ask: Callable[[Serving, str], str]
) -> Iterator[tuple[str, str | SpecError]]:
    """Yield the answer of each engine, or the error by which it refuses the folder; ``ask`` gets its name, too."""
    for name, engine_type in load_each(Engine, draft.serving_methods):
        if isinstance(engine_type, PluginError) or engine_type.serving is None:
            continue
        failure = f"engine {name!r} ({find(Engine, name).owner}) fails to name its serving command"
        try:
            with foreign_errors(PluginError, failure):
                engine_type.serving.check_export(target, draft, folder)
                answer = _of_type(ask(engine_type.serving, name), str)
        except PluginError as error:
            log.warning("%s", error)
            continue
        except SpecError as error:
            answer = error
        yield name, answer


def closing_lines(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines with the draft's acceptance length, speed-up and serving commands.

    ``figures`` is the summary of a run or of an evaluation.
    """
    yield f"acceptance length (tau): {_acceptance_length(figures)}"
    if (speedup := figures.get("speedup")) is not None:
        engine = f" in engine {figures['engine']}" if "engine" in figures else ""
        yield f"speed-up: {speedup:.2f} times{engine}"
        if speedup < 1:
            yield (
                "this draft makes decoding slower here; docs/serve.md says when not to use a draft, and "
                "docs/troubleshooting.md what raises its acceptance length"
            )
    yield from command_lines(figures["serve"])
    if not figures["serve"]:
        yield "no engine that has a plugin here serves this draft; spec-trainer plugins lists them"


def command_lines(serve: Mapping[str, str]) -> Iterator[str]:
    """Yield a line with each engine and the command that serves the draft with it."""
    for engine, command in serve.items():
        yield f"serve it with {engine}:\n  {command}"


def _acceptance_length(figures: Mapping[str, Any]) -> str:
    if (measured := figures.get("acceptance_length")) is not None:
        return f"{measured:.2f} tokens a pass, measured"
    if (in_rounds := figures.get("eval_acceptance_length_rounds")) is not None:
        return f"{in_rounds:.2f} tokens a pass, in an engine's rounds of the held-out answers"
    if (simulated := figures.get("eval_acceptance_length")) is not None:
        return f"{simulated:.2f} tokens a pass, simulated on held-out data; spec-trainer evaluate measures it"
    return "not known; spec-trainer evaluate measures it"
