"""SglangDraftSlot holds the draft that an SGLang scheduler serves, and a spare copy for updates.

The draft's own ``load_weights`` loads an update into the spare. For DFlash, SGLang's class then derives
stacked weights for keys and values. An Eagle3 draft's token ids are derived, too, but an update that changes
them is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from spec_core.errors import EngineError
from spec_engine_sglang.spare_model import spare_of
from spec_kit.weight_sync import DraftLayout, Exchange, ExchangedSlot

_HELPER = "_fused_kv_helper"
"""SGLang's attribute of a DFlash worker: an object that computes the keys and values of all layers at once, if
possible."""
_STACKED = ("flat_kv_weight_t", "k_norm_weights")
"""Attributes of the object ``_HELPER`` that are derived from the draft's weights."""
_NO_WEIGHTS = ("cos_sin_cache", "sts_temperatures", "_last_confidence_raw")
"""SGLang's names of tensors in a draft that are not weights, and are therefore not exchanged.

They are the table of a rotary embedding, which live and spare share and which may grow, and the temperatures
and the last output of DSpark's confidence head.
"""
_COPIES = ("_fused_kv_write_bundle", "_stacked_ctx_kv_params")
"""Methods of a DSpark draft, from SGLang 0.5.17 on. They store copies of its weights that an exchange cannot
replace."""


class SglangDraftSlot(ExchangedSlot):
    """The live draft of one scheduler, and the spare: a second model, into which an update is loaded."""

    def __init__(self, scheduler: Any, layout: DraftLayout) -> None:
        """Use the draft of ``scheduler``; ``layout`` is the layout of the folder that this draft was loaded from.

        Raise EngineError if this SGLang cannot exchange its draft.
        """
        self._worker = scheduler.draft_worker
        self._live = exchangeable_draft(scheduler)
        self._spare: nn.Module | None = None
        self._spare_helper: Any = None
        target = scheduler.tp_worker.model_runner.model
        super().__init__(next(self._live.parameters()).device, layout, target)

    def load_spare(self, weights: Iterator[tuple[str, Tensor]]) -> Exchange:
        """Load the spare with the draft's own loader, then derive the tensors that SGLang derives from weights."""
        if self._spare is None:
            self._spare = spare_of(self._live, self._target)
        self._spare.load_weights(_for_loader(weights))  # type: ignore[operator]
        if (helper := self._helper) is not None:
            self._spare_helper = type(helper)(
                self._spare.layers,
                helper.rotary_emb,
                num_kv_heads=helper.num_kv_heads,
                head_dim=helper.head_dim,
                device=helper.device,
            )
        return Exchange(self.tensors("live"), self.tensors("spare"))

    def tensors(self, copy: Literal["live", "spare"]) -> dict[str, Tensor]:
        """Return one copy's own tensors, and the tensors that SGLang derives from the copy's weights."""
        model, helper = (self._live, self._helper) if copy == "live" else (self._spare, self._spare_helper)
        if model is None:
            raise EngineError("there is no spare: no update was ever prepared")
        derived = {} if helper is None else {f"stacked.{name}": getattr(helper, name) for name in _STACKED}
        return {**self.own_tensors(model, _NO_WEIGHTS), **derived}

    def swap(self) -> None:
        """Exchange live and spare, after waiting for the forward pass that the scheduler has launched."""
        if not torch.empty(0, device=self.device).is_cpu:
            torch.accelerator.synchronize(self.device)
        super().swap()

    @property
    def _helper(self) -> Any:
        # Its __getattr__ would ask the target's worker.
        return vars(self._worker).get(_HELPER)


def exchangeable_draft(scheduler: Any) -> nn.Module:
    """Return the model of a scheduler's draft. Raise EngineError if exchanging it would be wrong or incomplete."""
    algorithm, arguments = scheduler.spec_algorithm, scheduler.server_args
    if not (algorithm.is_eagle3() or algorithm.is_dflash() or algorithm.is_dspark()):
        raise EngineError(
            f"SGLang's {algorithm.name} takes no fresh weights here; EAGLE3, DFLASH and DSPARK drafts do"
        )
    if arguments.dp_size > 1 or arguments.pp_size > 1:
        raise EngineError("this SGLang is data- or pipeline-parallel; start one server for each replica")
    held = scheduler.draft_worker.draft_worker
    runners = getattr(held, "draft_runners", None) or [held.model_runner]
    if len(runners) != 1:
        raise EngineError(f"this SGLang drafts with {len(runners)} models; expected one")
    if (quantized := runners[0].model_config.quantization) is not None:
        raise EngineError(f"this SGLang has quantized the draft ({quantized}); start it with a plain one")
    model = runners[0].model
    if any(hasattr(model, name) for name in _COPIES):
        raise EngineError(
            "this SGLang keeps copies of a DSpark draft's weights, which would stay old; SGLang 0.5.16 keeps none"
        )
    return model


def _for_loader(weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield a copy of each tensor for the draft's loader.

    Copies are needed because a tensor is valid only until the next one is read, and the loader may collect
    several. Copies of token ids are on the CPU, where the loader adds other ids to them. One call of the
    loader gets all tensors, because it may join two of them, or check at its end whether any is missing.
    """
    for name, tensor in weights:
        device = tensor.device if tensor.is_floating_point() else torch.device("cpu")
        yield name, tensor.to(device, copy=True)
