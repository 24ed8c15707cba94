"""An exported draft's folder, brought to life for reference decoding by whichever installed plugin knows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from spec_core.draft import Draft
from spec_core.errors import ArtifactError, PluginError
from spec_core.plugins import installed, load
from spec_core.target_ops import TargetOps
from spec_core.target_reader import read_target_tensors
from spec_trainer.engines.decoding import Drafting

if TYPE_CHECKING:
    from pathlib import Path

    from spec_core.target import TargetSpec


def load_draft(folder: Path, target: TargetSpec, device: torch.device, dtype: torch.dtype) -> Drafting:
    """Proposers of the draft in ``folder``, on ``device``, computing in ``dtype``.

    Raises ArtifactError where no installed draft recognises the folder or it is damaged, TargetError where the
    draft does not go with ``target``.
    """
    draft = recognise(folder)
    draft.check_target(target)
    tensors = read_target_tensors(target)
    # A build draws initial weights before it reads the folder's; a run's own random state must not notice.
    with torch.random.fork_rng(devices=[]):
        module = draft.build(target, tensors, None)
    module = module.to(device, dtype).eval().requires_grad_(False)
    ops = TargetOps(target, tensors, device, dtype)
    return Drafting(
        new_proposer=lambda: draft.proposer(module, ops),
        layers=draft.required_features(target).layers,
    )


def recognise(folder: Path) -> Draft:
    """The installed draft whose export ``folder`` is."""
    if not folder.is_dir():
        raise ArtifactError(f"draft {folder} is not a folder")
    tried: list[str] = []
    for name in sorted({record.name for record in installed(Draft)}):
        try:
            plugin = load(Draft, name)
        except PluginError as error:
            tried.append(f"{name} (broken: {error})")
            continue
        draft = plugin.from_folder(folder)
        if draft is not None:
            return draft
        tried.append(name)
    raise ArtifactError(
        f"{folder} is not a draft that an installed plugin knows (tried: {', '.join(tried) or 'none'})"
    )
