"""WorkerExtension adds methods to vLLM's worker class; ``--worker-extension-cls`` names it.

vLLM makes WorkerExtension a base class of its worker, and calls its methods on every rank, between two steps
of the engine (``collective_rpc``). Arguments and answers are strings, dicts, booleans and bytes. vLLM imports
this module before it loads the model, so that states can be captured from the first request on.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_engine_vllm.frozen_tables import FrozenTables
from spec_engine_vllm.sampler_check import SamplerCheck
from spec_engine_vllm.serving_capture import capture_if_asked, states_of
from spec_kit.hosting import DraftRank

if TYPE_CHECKING:
    from spec_engine_vllm.vllm_draft_slot import VllmDraftSlot


class WorkerExtension(SamplerCheck, FrozenTables):
    """Methods for vLLM's worker: updates of the draft, states of requests, checks of sampler and frozen tables."""

    def spec_draft(self, call: str, argument: str = "") -> dict[str, str] | None:
        """Return the answer of this rank's ``DraftRank``; None if vLLM serves no draft."""
        if self.model_runner.get_draft_model() is None:  # type: ignore[attr-defined]
            return None
        return _rank_of(self).answer(call, argument)

    def spec_states(self, asked: str = "") -> dict[str, Any] | None:
        """Return states of a request that this server has served; None on all ranks but the first."""
        return states_of(self.model_runner, asked)  # type: ignore[attr-defined]


_RANK = "_spec_draft_rank"
"""Name of a worker's attribute that holds its DraftRank. The first call makes the DraftRank, because vLLM's
configuration is not complete earlier."""


def _rank_of(worker: Any) -> DraftRank:
    if not hasattr(worker, _RANK):
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        setattr(worker, _RANK, DraftRank(lambda: draft_slot(worker), get_tensor_model_parallel_rank()))
    return getattr(worker, _RANK)


def draft_slot(worker: Any) -> VllmDraftSlot:
    """Return the slot of the draft that this worker runs, over the weights of its model."""
    from spec_engine_vllm.vllm_draft_slot import VllmDraftSlot
    from spec_kit.targets import read_target
    from spec_kit.weight_sync import DraftLayout

    config = worker.vllm_config
    draft = _folder(config.speculative_config.draft_model_config)
    layout = DraftLayout.of_folder(draft, read_target(_folder(config.model_config)))
    return VllmDraftSlot(worker, layout)


def _folder(model_config: Any) -> Path:
    """Return the folder from which vLLM has loaded a model."""
    folder = Path(model_config.model)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model_config.model, revision=model_config.revision, local_files_only=True))


capture_if_asked()
