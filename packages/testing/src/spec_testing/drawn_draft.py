"""Write exported drafts with random weights, for tests of engines with speculative decoding."""

from __future__ import annotations

from pathlib import Path

import torch

from spec_core import Draft, TargetSpec, plugins
from spec_kit.drafting import write_draft
from spec_kit.targets import read_target_tensors

_STD = 0.5
"""Standard deviation of the weights: large enough that the draft's guesses depend on them."""


def draw_draft(
    folder: Path, target: TargetSpec, seed: int, algorithm: str = "eagle3", **options: object
) -> Path:
    """Write an export with random weights for ``target`` into ``folder``, and return ``folder``.

    If ``folder`` exists, it is returned unchanged. ``algorithm``: name of an installed draft plugin. ``options``: its
    options. Exports of different seeds differ only in the weights.
    """
    if folder.exists():
        return folder
    plugin = plugins.load(Draft, algorithm)
    draft = plugin(plugin.Config.model_validate({"name": plugin.name, **options}))
    folder.mkdir()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = draft.build(target, read_target_tensors(target), None)
        for parameter in module.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=_STD)
    write_draft(draft, module.state_dict(), target, folder)
    return folder
