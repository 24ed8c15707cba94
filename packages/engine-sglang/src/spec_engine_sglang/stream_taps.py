"""Capture the residual stream of an SGLang model by hooks, into one buffer for each forward pass.

SGLang stores the stream as two summands, ``hidden_states`` and ``residual``, which fused kernels add *in
place*. A hook must therefore add them immediately, into separate memory. In 0.5.16 a decoder layer takes both
summands as arguments. In 0.5.23 the batch carries them, and a layer takes a callback ``capture_output`` or a
collector ``captured_last_layer_outputs`` that gets their sum. The final norm takes both summands in either
version. Sources: ``models/llama.py``, ``models/qwen3.py``, ``models/qwen3_5.py``, ``layers/layer_boundary/``.

Shapes: R rows of a forward pass (tokens of all its requests), N captured layers, H hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from spec_core.errors import EngineError
from spec_core.records import FeatureSchema

Tap = Callable[..., None]
"""A hook, called as ``tap(hidden_states, residual=None)``."""
PreHook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]


_LATE = "post_residual_addition"
"""Keyword by which the next layer gets a further summand of the stream, which Qwen3-VL adds after a layer for
images, in SGLang 0.5.16. Layers with experts have no argument of this name: they take any keyword."""
_COLLECTOR = "captured_last_layer_outputs"
"""Name of a layer's argument that collects the stream, in SGLang 0.5.23."""


class StreamTaps:
    """Hooks that capture the residual stream; they are idle until ``open``.

    ``close`` raises any error of a pass, because an exception within the pass would end SGLang.
    """

    def __init__(self, model: nn.Module, schema: FeatureSchema, norm: str) -> None:
        """Hook ``model``. ``norm``: name of the decoder's attribute that is the final norm.

        Raise EngineError if the model cannot be captured.
        """
        self._schema = schema
        self._buffer_RNH: Tensor | None = None
        self._missing: set[int] = set()
        self._problem: str | None = None
        name, decoder = find_decoder(model, norm)
        self.description = (
            f"{type(model).__name__}.{name}, {len(decoder.layers)} x {_kind(decoder.layers[0])}"
        )
        for index, layer in enumerate(schema.layers):
            tap = partial(self._take, index)
            if layer == len(decoder.layers):
                getattr(decoder, norm).register_forward_pre_hook(before_norm(tap), with_kwargs=True)
            else:
                hook = _before_layer(decoder.layers[layer], tap)
                decoder.layers[layer].register_forward_pre_hook(hook, with_kwargs=True)

    def open(self, num_rows: int, device: torch.device) -> None:
        """Prepare for a forward pass of ``num_rows`` rows."""
        self._problem = None
        self._missing = set(range(len(self._schema.layers)))
        try:
            # A tensor made in SGLang's inference mode could not be written to outside that mode.
            with torch.inference_mode(False):
                self._buffer_RNH = torch.empty(
                    self._schema.shape(num_rows), dtype=self._schema.torch_dtype(), device=device
                )
        except RuntimeError as error:  # out of memory
            self._problem = f"no memory for the states of {num_rows} tokens: {error}"

    def close(self) -> Tensor:
        """Return the states [R, N, H]. Raise EngineError if they are incomplete."""
        states_RNH, self._buffer_RNH = self._buffer_RNH, None
        if self._problem is None and self._missing:
            layers = [self._schema.layers[index] for index in sorted(self._missing)]
            self._problem = f"SGLang ran a forward pass without calling layers {layers} (a replayed graph?)"
        if self._problem is not None or states_RNH is None:
            raise EngineError(self._problem or "no forward pass was opened")
        return states_RNH

    def _take(
        self,
        index: int,
        hidden: Tensor,
        residual: Tensor | None = None,
        late: Tensor | None = None,
        **_: object,
    ) -> None:
        """Store the stream that enters a layer; ``index`` is the layer's index in the schema.

        ``late``: a summand that the model adds to the stream only inside this layer. Other arguments come
        from SGLang's callback (``owned``) and are ignored.
        """
        if self._buffer_RNH is None:
            return
        self._missing.discard(index)
        self._problem = self._problem or what_is_wrong(
            hidden, residual, len(self._buffer_RNH), self._buffer_RNH.shape[-1]
        )
        if self._problem is None:
            rows = len(self._buffer_RNH)  # further rows are padding
            out_RH = self._buffer_RNH[:, index]
            if residual is None:
                out_RH.copy_(hidden[:rows])
            else:
                torch.add(hidden[:rows], residual[:rows], out=out_RH)
            if late is not None:
                out_RH += late[:rows]


def find_decoder(model: nn.Module, norm: str) -> tuple[str, Any]:
    """Return the module that holds ``layers`` and the final norm, and the module's name.

    If there are several such modules, as in a target with a vision tower, return the module with the most
    layers.
    """
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(getattr(module, "layers", None), nn.ModuleList)
        and isinstance(getattr(module, norm, None), nn.Module)
    ]
    if not found:
        raise EngineError(
            f"{type(model).__name__} has no decoder with 'layers' and {norm!r}; it cannot be captured"
        )
    return max(found, key=lambda pair: len(pair[1].layers))


def _kind(layer: nn.Module) -> str:
    return f"{type(layer).__name__}({', '.join(inspect.signature(layer.forward).parameters)})"


def _before_layer(layer: nn.Module, tap: Tap) -> PreHook:
    signature = inspect.signature(layer.forward)
    names = signature.parameters.keys()
    if "capture_output" in names:
        return partial(_pass_callback, tap)
    # Qwen3.5's recurrent layers take any argument.
    is_open = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    if hasattr(layer, "attn_boundary") and (_COLLECTOR in names or is_open):
        return partial(_pass_collector, tap)
    if not {"hidden_states", "residual"} <= names:
        raise EngineError(f"layers of a kind that cannot be captured: {_kind(layer)}")

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = signature.bind(*args, **kwargs).arguments
        tap(given["hidden_states"], given.get("residual"), late=kwargs.get(_LATE))

    return hook


def _pass_callback(
    tap: Tap, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def both(hidden: Tensor, **how: Any) -> None:
        tap(hidden)
        if theirs is not None:
            theirs(hidden, **how)

    theirs = kwargs.get("capture_output")
    return args, {**kwargs, "capture_output": both}


def _pass_collector(
    tap: Tap, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, {**kwargs, _COLLECTOR: _Collector(tap, kwargs.get(_COLLECTOR))}


class _Collector:
    """Gives the stream that enters a layer to a tap, and to SGLang's own collector if there is one."""

    def __init__(self, tap: Tap, theirs: Any) -> None:
        self._tap = tap
        self._theirs = theirs

    def capture(self, hidden: Tensor, *, owned: bool = False) -> None:
        self._tap(hidden)
        if self._theirs is not None:
            self._theirs.capture(hidden, owned=owned)


def before_norm(tap: Tap) -> PreHook:
    """Return a pre-hook of the final norm that calls ``tap`` with the two summands of the norm's input."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        residual = args[1] if len(args) > 1 else kwargs.get("residual")
        tap(args[0], residual, late=kwargs.get(_LATE))

    return hook


def what_is_wrong(hidden: Any, residual: Any, num_rows: int, width: int) -> str | None:
    """Return why two summands of the stream cannot be captured; None if they can."""
    for part in (hidden, residual):
        if part is None:
            continue
        if not isinstance(part, torch.Tensor):
            return f"the residual stream is no tensor but a {type(part).__name__}"
        if part.ndim != 2 or part.shape[1] != width or part.shape[0] < num_rows:
            return f"the residual stream has shape {list(part.shape)}, expected [{num_rows} or more, {width}]"
    if getattr(hidden, "_sglang_needs_allreduce_fusion", False):
        return "the residual stream is a partial sum: SGLang adds it up over ranks in a later kernel"
    return None
