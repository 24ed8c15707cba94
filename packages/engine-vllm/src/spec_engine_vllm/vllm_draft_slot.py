"""VllmDraftSlot holds the live draft of a vLLM worker and the spare, a second instance of this model.

An update is loaded into the spare, and a swap exchanges the contents of both models in place. vLLM's own code
makes and loads the spare, so that tensors derived from weights are the same as in a newly started vLLM:
DFlash's stacked keys and values, weights packed for the CPU, and the hidden state of mask tokens. No forward
pass ever runs the spare.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from vllm.config import CompilationMode
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype

from spec_core.errors import EngineError
from spec_engine_vllm.packed_weights import PACKED, packed_steps
from spec_kit.weight_sync import DraftLayout, Exchange, ExchangedSlot

_GROUP_BYTES = 512 << 20
"""Size of a group of tensors, in bytes, that are copied and then loaded by vLLM together."""
_MASK = "mask_hidden"
"""Name of the mask tensor of a draft that guesses all tokens in one pass. The draft's loader needs this
tensor in every call."""
_MASK_STATE = "parallel_drafting_hidden_state_tensor"
"""Name of a tensor of vLLM's drafter, not of the model: the mask tokens' hidden state, which is ``fc``
applied to ``mask_hidden``."""
_LENT = ("kv_cache",)
"""Name of the attribute by which vLLM assigns the KV cache to an attention layer."""


class VllmDraftSlot(ExchangedSlot):
    """The live draft of one worker, and the spare: a second model, into which an update is loaded."""

    def __init__(self, worker: Any, layout: DraftLayout) -> None:
        """Use the draft of ``worker``. ``layout``: the layout of the folder from which this draft was loaded.

        Raise EngineError if this vLLM cannot exchange its draft.
        """
        super().__init__(worker.device, layout, worker.get_model())
        self._live: nn.Module = worker.model_runner.get_draft_model()  # vllm-ascend's worker lacks the method
        self._vllm_config = _config_of(self._live) or worker.vllm_config
        self._model_config = worker.vllm_config.speculative_config.draft_model_config
        self._spare: nn.Module | None = None
        self._blank: nn.Module | None = None
        self._is_reloadable = False
        parallel = worker.vllm_config.parallel_config
        self._is_split = parallel.tensor_parallel_size > 1
        _check_exchangeable(self._live, parallel)
        self._mask_states = _mask_states(worker, self._live)
        of_target = set(self._target.modules())
        self._shared = {
            path: module
            for path, module in self._live.named_modules()
            if module in of_target and "weight" in module._parameters
        }
        """Modules with weights that the live draft shares with the target, by path."""

    def make_blank(self) -> None:
        """Make a spare model for ``load``, unless the existing spare can be loaded again.

        This runs between two steps of the engine. The existing spare can be loaded again if loading does not
        change its parameters' names and shapes; on the CPU, packing removes parameters. A model is made here
        and not in ``load`` because vLLM's current configuration and torch's default dtype, which vLLM's
        layers use, are global.
        """
        if self._blank is None and not self._is_reloadable:
            self._blank = self._new_model()
            if not torch.empty(0, device=self.device).is_cpu:
                # The stream on which an update is loaded does not wait for the engine's stream.
                torch.accelerator.synchronize(self.device)

    def load_spare(self, weights: Iterator[tuple[str, Tensor]]) -> Exchange:
        """Load the spare with the model's own loader, in few calls.

        Each call of the loader computes all derived tensors again.
        """
        if self._blank is not None:
            self._spare, self._blank = self._blank, None
        assert self._spare is not None, "make_blank was not called"
        made = _outline(self._spare)
        for group in _groups(self._own(weights)):
            self._spare.load_weights(self._with_mask(group))  # type: ignore[operator]
        process_weights_after_loading(self._spare, self._model_config, self.device)
        self._derive_mask_state()
        self._is_reloadable = _outline(self._spare) == made
        packed = packed_steps(self._live, self._spare, self._target)
        return Exchange(self.tensors("live"), self.tensors("spare"), packed)

    def tensors(self, copy: Literal["live", "spare"]) -> dict[str, Tensor]:
        """Return the tensors of one copy, without the KV cache and without the target's tensors."""
        return self.own_tensors(self._model(copy), _LENT) | self._mask_states.get(copy, {})

    def _model(self, copy: Literal["live", "spare"]) -> nn.Module:
        model = self._live if copy == "live" else self._spare
        if model is None:
            raise EngineError("there is no spare: no update was ever prepared")
        return model

    def _with_mask(self, group: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Add the spare's mask tensor to a group of tensors that lacks it."""
        if not self._mask_states or any(name == _MASK for name, _ in group):
            return group
        return [*group, (_MASK, self._model("spare").get_buffer(_MASK))]

    def _derive_mask_state(self) -> None:
        """Compute the mask tokens' hidden state of the spare, as vLLM does after it has loaded a draft."""
        if self._mask_states:
            spare = self._model("spare")
            state = self._mask_states["spare"][_MASK_STATE]
            state.copy_(spare.combine_hidden_states(spare.get_buffer(_MASK).view(-1)))  # type: ignore[operator]

    def _new_model(self) -> nn.Module:
        """Return a model like the live draft, with unloaded weights, without modules shared with the target."""
        config = copy.copy(self._vllm_config)
        # A new layer registers itself in this context, which refuses a name that it already has.
        config.compilation_config = compilation = copy.copy(config.compilation_config)
        compilation.static_forward_context = {}
        compilation.static_all_moe_layers = []
        compilation.mode = CompilationMode.NONE
        with set_default_torch_dtype(self._model_config.dtype), self.device:
            model = initialize_model(config, model_config=self._model_config)
        for path in self._shared:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, torch.nn.Identity())
        for path, _ in list(model.named_parameters()):
            parent, _, name = path.rpartition(".")
            if getattr(self._live.get_submodule(parent), name, ...) is None:
                # vllm-ascend removes draft_id_to_target_id from drafts of the whole vocabulary.
                setattr(model.get_submodule(parent), name, None)
        return model.eval()

    def _own(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the draft's own tensors, and leave out tensors that vLLM takes from the target instead.

        Raise EngineError if a tensor that is left out differs from the target's tensor.
        """
        for name, tensor in weights:
            owner = name.rpartition(".")[0]
            of_target = [module for path, module in self._shared.items() if f".{path}".endswith(f".{owner}")]
            if of_target:
                self._check_unchanged(name, tensor, of_target[0])
            else:
                yield name, tensor

    def _check_unchanged(self, name: str, tensor: Tensor, shared: nn.Module) -> None:
        """Raise EngineError if ``tensor`` differs from the target's tensor, which vLLM uses instead."""
        serving = shared.get_parameter("weight")[: len(tensor)]
        if self._is_split or not torch.equal(tensor.to(serving.device, serving.dtype), serving):
            raise EngineError(
                f"the update changes {name}, which vLLM shares with the target because it was equal at the start; "
                "start vLLM with a draft whose own differs"
            )


def _groups(weights: Iterator[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield copies of the tensors in groups; each tensor is valid only until the next tensor is read."""
    group: list[tuple[str, Tensor]] = []
    num_bytes = 0
    for name, tensor in weights:
        group.append((name, tensor.clone()))
        num_bytes += tensor.nbytes
        if num_bytes >= _GROUP_BYTES:
            yield group
            group = []
            num_bytes = 0
    if group:
        yield group


def _config_of(model: nn.Module) -> Any:
    """Return the vLLM configuration that a submodule has stored; None if no submodule has stored one."""
    noted = (module.__dict__.get("vllm_config") for module in model.modules())
    return next((config for config in noted if config is not None), None)


def _mask_states(worker: Any, live: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Return each copy's hidden state of mask tokens, or an empty dict for a draft without mask tokens.

    vLLM holds this state outside the model.
    """
    if not hasattr(live, _MASK):
        return {}
    state = getattr(getattr(worker.model_runner, "drafter", None), _MASK_STATE, None)
    if state is None:
        raise EngineError(
            "this vLLM derives a state of masks from the draft where it is not known: start it anew"
        )
    return {"live": {_MASK_STATE: state}, "spare": {_MASK_STATE: torch.empty_like(state)}}


def _check_exchangeable(live: nn.Module, parallel: Any) -> None:
    if parallel.data_parallel_size > 1:
        raise EngineError("this vLLM is data-parallel; start one server for each replica")
    packed = any(PACKED in module.__dict__ for module in live.modules())
    compiled = any(not getattr(module, "do_not_compile", True) for module in live.modules())
    if packed and compiled:
        raise EngineError("on the CPU a compiled draft cannot be exchanged; start vLLM with --enforce-eager")


def _outline(model: nn.Module) -> dict[str, torch.Size]:
    return {path: parameter.shape for path, parameter in model.named_parameters()}
