"""WorkerExtension: what spec-trainer adds to vLLM's worker class, by ``--worker-extension-cls``.

vLLM makes it a base class of its worker and lets its methods be called on every rank, between two steps of the engine
(``collective_rpc``). Arguments and answers are plain values.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_core import ServingStatus, UpdateId, UpdateOrder
from spec_core.errors import EngineError, SpecError
from spec_core.hosting import backend_for
from spec_engine_vllm.sampler_check import SamplerCheck

if TYPE_CHECKING:
    from spec_core.weight_sync import UpdateReceiver
    from spec_engine_vllm.draft_slot import VllmDraftSlot


class WorkerExtension(SamplerCheck):
    """An extension of vLLM's worker class: fresh weights for the draft, and a check of the sampler."""

    def spec_draft(self, call: str, argument: str = "") -> dict[str, str] | None:
        """Return this rank's ``status`` after a call, or the reason why it is ``refused``; None without a draft.

        ``call`` is ``prepare``, with an UpdateOrder as JSON, ``commit``, ``revert`` or ``abort``, with an UpdateId,
        ``status`` or ``forget``.
        """
        if self.get_draft_model() is None:  # type: ignore[attr-defined]
            return None
        try:
            return {"status": _call(self, call, argument).model_dump_json()}
        except (SpecError, RuntimeError) as error:  # RuntimeError: torch's, such as out of memory
            return {"refused": str(error)}


def _call(worker: Any, call: str, argument: str) -> ServingStatus:
    if call == "prepare":
        order = UpdateOrder.decode(argument)
        slot, receiver = _updates(worker, order.update.group)
        slot.make_blank()
        return receiver.prepare(order)
    if not hasattr(worker, _UPDATES):
        if call in ("status", "forget"):
            return ServingStatus()
        raise EngineError("no update was ever prepared")
    _, receiver = getattr(worker, _UPDATES)
    if call == "forget":
        receiver.forget()
    if call in ("status", "forget"):
        return receiver.status()
    act = {"commit": receiver.commit, "revert": receiver.revert, "abort": receiver.abort}[call]
    return act(UpdateId.decode(argument))


_UPDATES = "_spec_draft_updates"
"""Attribute of a worker with its slot and receiver. They are made by the first update, not by the class: vLLM's
configuration is complete only then, and a draft without updates costs no memory twice."""


def _updates(worker: Any, group: str) -> tuple[VllmDraftSlot, UpdateReceiver]:
    if not hasattr(worker, _UPDATES):
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        from spec_core.weight_sync import UpdateReceiver, open_weight_transports
        from spec_engine_vllm.draft_slot import VllmDraftSlot

        slot = VllmDraftSlot(worker, _layout(worker.vllm_config))
        transports = open_weight_transports(backend_for(worker.device.type))
        receiver = UpdateReceiver(slot, transports, group=group, rank=get_tensor_model_parallel_rank())
        setattr(worker, _UPDATES, (slot, receiver))
    return getattr(worker, _UPDATES)


def _layout(vllm_config: Any) -> Any:
    from spec_core.targets import read_target
    from spec_core.weight_sync import DraftLayout

    draft = vllm_config.speculative_config.draft_model_config
    return DraftLayout.of_folder(_folder(draft), read_target(_folder(vllm_config.model_config)))


def _folder(model_config: Any) -> Path:
    """Return the folder that vLLM has read a model from."""
    folder = Path(model_config.model)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model_config.model, revision=model_config.revision, local_files_only=True))
