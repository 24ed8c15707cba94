"""Build proposers for reference decoding from an exported draft's folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spec_core.drafting import recognise

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from spec_core import TargetSpec
    from spec_engine_hf.decoding import DraftSource


def load_draft(folder: Path, target: TargetSpec, device: torch.device, dtype: torch.dtype) -> DraftSource:
    """Return proposers of the draft in ``folder``, on ``device``, computing in ``dtype``.

    Raise ArtifactError where no installed draft recognises the folder or it is damaged, TargetError where the draft
    does not fit ``target``.
    """
    import torch

    from spec_core.drafting import TargetOps
    from spec_core.targets import read_target_tensors
    from spec_engine_hf.decoding import DraftSource

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
