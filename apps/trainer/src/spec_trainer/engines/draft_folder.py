"""An exported draft's folder: checked, and brought to life for reference decoding by whichever plugin knows it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from spec_core.draft import Draft
from spec_core.engine import Engine
from spec_core.errors import ArtifactError, ConfigError, PluginError, RunError, UsageError
from spec_core.plugins import load_each
from spec_core.served_draft import architectures, read_config

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from spec_core.target import TargetSpec
    from spec_trainer.engines.decoding import DraftSource

log = logging.getLogger(__name__)

CHAIN_TOKENS = 4
"""Draft tokens a round, unless asked for, where a draft has no limit of its own."""


def load_draft(folder: Path, target: TargetSpec, device: torch.device, dtype: torch.dtype) -> DraftSource:
    """Proposers of the draft in ``folder``, on ``device``, computing in ``dtype``.

    Raises ArtifactError where no installed draft recognises the folder or it is damaged, TargetError where the
    draft does not go with ``target``.
    """
    import torch

    from spec_core.target_ops import TargetOps
    from spec_core.target_reader import read_target_tensors
    from spec_trainer.engines.decoding import DraftSource

    draft = recognise(folder, target)
    tensors = read_target_tensors(target)
    # A build draws initial weights before it reads the folder's; a run's own random state must not notice.
    with torch.random.fork_rng(devices=[]):
        module = draft.build(target, tensors, None)
    module = module.to(device, dtype).eval().requires_grad_(False)
    ops = TargetOps(target, tensors, device, dtype)
    return DraftSource(
        new_proposer=lambda: draft.proposer(module, ops),
        layers=draft.required_features(target).layers,
    )


def check_draft(folder: Path, target: TargetSpec, num_draft_tokens: int | None) -> tuple[Draft, int]:
    """The draft in ``folder`` and how many tokens it is to propose a round (None: as many as it can, at most
    ``CHAIN_TOKENS`` for one that could go on). Starts nothing.

    Raises ArtifactError for a folder that is damaged or no draft, TargetError for another target's, ConfigError for
    more tokens than the draft can propose.
    """
    draft = recognise(folder, target)
    most = draft.max_draft_tokens
    if num_draft_tokens is None:
        return draft, CHAIN_TOKENS if most is None else most
    if most is not None and num_draft_tokens > most:
        raise ConfigError(
            f"--num-draft-tokens={num_draft_tokens}: draft {folder} has blocks of {most + 1} (a known token and "
            f"{most} guesses); use {most} or less"
        )
    return draft, num_draft_tokens


def check_export(draft: Draft, folder: Path, target: TargetSpec) -> None:
    """Read back what ``draft`` has exported. Its plugin must find it whole and made for ``target``, and every
    installed engine must read in it what was written. Raises RunError: it is no fault of the user's."""
    try:
        again = type(draft).from_folder(folder)
        if again is None:
            raise ArtifactError(f"{draft.name} does not recognise it")
        again.check_target(target)
        for name, engine_type in load_each(Engine):
            if isinstance(engine_type, PluginError):
                log.warning("the export is not checked for engine %s: %s", name, engine_type)
            else:
                engine_type.check_export(target, again, folder)
    except UsageError as error:
        raise RunError(f"the {draft.name} draft was exported and fails the check: {error}") from error


def recognise(folder: Path, target: TargetSpec) -> Draft:
    """The installed draft whose export ``folder`` is. Raises ArtifactError where there is none or the folder is
    damaged, TargetError where the draft does not go with ``target``."""
    if not folder.is_dir():
        raise ArtifactError(f"draft {folder} is not a folder")
    tried: list[str] = []
    for name, plugin in load_each(Draft):
        if isinstance(plugin, PluginError):
            tried.append(f"{name} (broken: {plugin})")
            continue
        draft = plugin.from_folder(folder)
        if draft is not None:
            draft.check_target(target)
            return draft
        tried.append(name)
    raise ArtifactError(
        f"{folder} is not a draft that an installed plugin knows (tried: {', '.join(tried) or 'none'}): "
        f"{_what_it_is(folder)}"
    )


def _what_it_is(folder: Path) -> str:
    fields = read_config(folder)
    if fields is None:
        return "it has no config.json"
    if kind := fields.get("speculators_model_type"):
        return f"it is in the speculators format ({kind}), which only vLLM loads; convert it"
    if not (named := architectures(fields)):
        return "its config.json names no architectures"
    return f"its config.json names the architecture {', '.join(sorted(named))}"
