"""Shapes of a draft's weights, from building it on torch's device ``meta``: nothing is read or computed."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

from spec_core.target import TargetTensors
from spec_kit.targets import stored_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from spec_core import TargetSpec
    from spec_trainer.run.spec import RunSpec

log = logging.getLogger(__name__)


def draft_shapes(run: RunSpec) -> dict[str, tuple[int, ...]]:
    """Return the shape of each trained weight by name; nothing where the draft's code needs real tensors."""
    import torch

    try:
        with torch.random.fork_rng(devices=()), torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # torch's, of weights from ``init_from``, which have no place on meta
            module = run.draft.build(run.target, _target_tensors(run.target), None)
    except (RuntimeError, ValueError, TypeError) as error:
        log.debug("the size of draft %s is not known before it is built: %s", run.config.draft.name, error)
        return {}
    return {name: tuple(value.shape) for name, value in module.named_parameters() if value.requires_grad}


def _target_tensors(target: TargetSpec) -> TargetTensors:
    others = _MetaTensors(target)
    return TargetTensors(
        embedding_VH=others[target.embedding_name],
        head_VH=others[target.head_name],
        norm_H=others[target.norm_name],
        others=others,
    )


class _MetaTensors(Mapping[str, "Tensor"]):
    """The tensors of a target's folder, without their values."""

    def __init__(self, target: TargetSpec) -> None:
        self._dtype = target.dtype
        self._stored = stored_tensors(target.folder)

    def __getitem__(self, name: str) -> Tensor:
        import torch

        return torch.empty(self._stored[name].shape, dtype=getattr(torch, self._dtype), device="meta")

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)
