"""Check an exported draft's folder, before an evaluation or after an export."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from spec_core import Draft, Engine, TargetSpec
from spec_core.errors import ArtifactError, ConfigError, PluginError, RunError, SpecError
from spec_core.foreign import cause
from spec_core.plugins import find, load_each
from spec_core.wording import counted
from spec_kit.drafting.draft_files import exported_config
from spec_kit.drafting.draft_folder import recognise

log = logging.getLogger(__name__)


def check_draft(folder: Path, target: TargetSpec, num_draft_tokens: int | None) -> tuple[Draft, int]:
    """Check the draft in ``folder``; return the draft and its number of draft tokens per round.

    If ``num_draft_tokens`` is None, that number is the draft's default. No engine is started. Raise
    ArtifactError if the folder is damaged or has no draft, TargetError if the draft belongs to another
    target, and ConfigError if the draft cannot propose ``num_draft_tokens`` tokens.
    """
    draft = recognise(folder, target)
    most = draft.max_draft_tokens
    if num_draft_tokens is None:
        return draft, draft.default_draft_tokens
    if most is not None and num_draft_tokens > most:
        raise ConfigError(
            f"--num-draft-tokens={num_draft_tokens}: draft {folder} guesses {counted(most, 'token')} in one block; "
            f"use {most} or less"
        )
    return draft, num_draft_tokens


def position_warning(draft: Draft, target: TargetSpec) -> str | None:
    """Return a warning if the draft's config.json has fewer positions than the target; else None."""
    positions: object = exported_config(draft, target).get("max_position_embeddings")
    if type(positions) is not int or positions >= target.max_positions:
        return None
    return (
        f"the draft has {positions} positions, target {target.folder} has {target.max_positions}: it was not made "
        f"for longer texts, and servers may refuse them (docs/targets.md); to serve them, "
        f"write max_position_embeddings={target.max_positions} into the draft's config.json and train it on them"
    )


def fresh_head_warning(draft: Draft, target: TargetSpec) -> str | None:
    """Return a warning if the draft starts from fresh weights although the target ships with one; else None."""
    if draft.config.init_from is not None:
        return None
    try:
        own = type(draft).from_folder(target.folder)
    except SpecError:  # the target's own draft is damaged, or quantised
        return None
    if own is None:
        return None
    return (
        f"target {target.folder} ships with a draft {draft.name!r} of its own, and this run begins with fresh "
        f"weights; set draft.init_from={target.folder} to train on from the target's"
    )


def check_export(draft: Draft, folder: Path, target: TargetSpec) -> None:
    """Check the folder that ``draft`` has exported.

    The draft's plugin and the engines that the draft names in ``serving_methods`` must accept the folder for
    ``target``; otherwise raise RunError, because the user is not at fault. Other engines are not asked.
    """
    exported = f"the {draft.name} draft was exported and fails the check"
    with _failures_of(f"{exported}: draft plugin {draft.name!r}"):
        again = type(draft).from_folder(folder)
        if again is None:
            raise ArtifactError(f"{draft.name} does not recognise it")
        again.check_target(target)
    for name, engine_type in load_each(Engine, draft.serving_methods):
        if isinstance(engine_type, PluginError):
            log.warning("the export is not checked for engine %s: %s", name, engine_type)
            continue
        with _failures_of(f"{exported}: engine {name!r} ({find(Engine, name).owner})"):
            if engine_type.serving is not None:
                engine_type.serving.check_export(target, again, folder)


@contextmanager
def _failures_of(checker: str) -> Generator[None]:
    """Turn any exception in the ``with`` block, a plugin's check, into a RunError.

    Its message is one line that begins with ``checker``.
    """
    try:
        yield
    except (Exception, SystemExit) as error:  # a plugin may raise anything
        raise RunError(f"{checker}: {cause(error)}") from error
