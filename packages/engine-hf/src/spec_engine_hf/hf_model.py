"""HfModel is a target loaded by Transformers, whose residual stream is captured by forward hooks.

Shape suffixes: B sequences of a forward pass, T tokens, N wanted layers, H hidden size, V vocabulary, R logit rows.
"""

from __future__ import annotations

import inspect
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from spec_core import FrozenProducts, TargetTensors, foreign_errors
from spec_core.errors import EngineError, TargetError
from spec_core.records import FeatureSchema
from spec_kit.layers import TargetOps
from spec_kit.targets import TargetImages, decoded_image
from spec_processes import hide_broken_extensions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from spec_core import TargetSpec
    from spec_core.records import ImageSource
    from spec_engine_hf.session import Session

# Kinds of layers whose cache can drop its last tokens; recurrent states cannot.
_REWINDABLE = frozenset({"full_attention", "sliding_attention", "chunked_attention"})

# Tolerance in the target's own dtype: rounding errors are far smaller, a missing scale or cap is far larger.
_HEAD_TOLERANCE = 0.05


class _AllCaptured(Exception):
    """Ends a forward pass early, once all wanted states are captured."""


class HfModel:
    """The target in evaluation mode. One thread at a time may use it."""

    def __init__(self, target: TargetSpec, device: torch.device, dtype: str) -> None:
        """Load the target's weights onto ``device`` as ``dtype``."""
        self.target = target
        self.device = device
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.causal_lm = _load(target, self.dtype).to(device)
        self._stack, layers, norm = _find_stack(self.causal_lm, target)
        self._norm = norm
        self._taps = [*layers, norm]
        self._check_head()

    def states(self, rows: Sequence[Sequence[int]], schema: FeatureSchema) -> list[Tensor]:
        """Run one forward pass up to the last layer of ``schema``; return each row's states [T, N, H]."""
        captured = [
            torch.empty(schema.shape(len(r)), dtype=schema.torch_dtype(), device=self.device) for r in rows
        ]

        def keep(index: int, state_BTH: Tensor) -> None:
            for row, captured_TNH in zip(state_BTH, captured, strict=True):
                captured_TNH[:, index].copy_(row[: len(captured_TNH)])

        # Padding is on the right, so a causal target never attends to it and needs no mask for it.
        with torch.no_grad(), self._captured(schema, keep):
            self._stack(input_ids=self._padded(rows), use_cache=False)
        return captured

    def states_with_images(
        self, row: Sequence[int], images: Sequence[ImageSource], schema: FeatureSchema
    ) -> Tensor:
        """Run one forward pass of a row with images; return the row's states [T, N, H].

        Raise DataError if an image cannot be read, and EngineError if the row's tokens do not match the
        images.
        """
        captured_TNH = torch.empty(schema.shape(len(row)), dtype=schema.torch_dtype(), device=self.device)

        def keep(index: int, state_BTH: Tensor) -> None:
            captured_TNH[:, index].copy_(state_BTH[0])

        arguments = self.image_arguments(row, images)
        with torch.no_grad(), self._captured(schema, keep):
            self.causal_lm.base_model(input_ids=self._padded([row]), use_cache=False, **arguments)
        return captured_TNH

    def image_arguments(self, row: Sequence[int], images: Sequence[ImageSource]) -> dict[str, Tensor]:
        """Return the arguments by which a forward pass over one row gets the row's images.

        They include the positions, so that the model stores no offset between tokens and positions for later
        passes. Raise DataError if an image cannot be read, and EngineError if the row's tokens do not match
        the images.
        """
        ids_BT = self._padded([row])
        arrays = self._images.arrays([decoded_image(image.read()) for image in images])
        arrays = {name: array.to(self.device) for name, array in arrays.items()}
        kind_BT = (ids_BT == self.target.image_token_id).int()
        model: Any = self.causal_lm.base_model
        if not hasattr(model, "get_rope_index"):  # positions are token indices
            position_BT = torch.arange(len(row), device=self.device)[None]
            return {**arrays, "mm_token_type_ids": kind_BT, "position_ids": position_BT}
        with target_errors(self.target):
            position_3BT, _ = model.get_rope_index(
                ids_BT, mm_token_type_ids=kind_BT, image_grid_thw=arrays["image_grid_thw"]
            )
        return {**arrays, "position_ids": position_3BT}

    @cached_property
    def _images(self) -> TargetImages:
        return TargetImages(self.target.folder)

    @contextmanager
    def _captured(self, schema: FeatureSchema, keep: Callable[[int, Tensor], None]) -> Iterator[None]:
        """Capture states like ``tapped``; end the forward pass when all of ``schema`` are captured."""
        last = len(schema.layers) - 1

        def keep_and_end(index: int, state_BTH: Tensor) -> None:
            keep(index, state_BTH)
            if index == last:
                raise _AllCaptured

        with self.tapped(schema.layers, keep_and_end), target_errors(self.target), suppress(_AllCaptured):
            yield

    @contextmanager
    def tapped(self, layers: Sequence[int], keep: Callable[[int, Tensor], None]) -> Iterator[None]:
        """Call ``keep(index, states)`` for each of ``layers`` during the forward passes within this context.

        ``index`` is the layer's position in ``layers``; ``states`` is the residual stream that enters it, [B,
        T, H].
        """
        seen: set[int] = set()

        def hook(index: int) -> Callable[..., None]:
            def take(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                seen.add(index)
                keep(index, args[0] if args else kwargs["hidden_states"])

            return take

        handles = [
            self._taps[layer].register_forward_pre_hook(hook(index), with_kwargs=True)
            for index, layer in enumerate(layers)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        if len(seen) != len(layers):
            raise EngineError(f"target {self.target.folder} did not run all of its layers {list(layers)}")

    def session(self, layers: tuple[int, ...] = ()) -> Session:
        """Return a session with an empty KV cache. Its forward passes also return the states of ``layers``."""
        from spec_engine_hf.session import Session

        return Session(self, layers)

    def next_logits(self, token_ids: Sequence[int], images: Sequence[ImageSource] = ()) -> Tensor:
        """Return the logits after a text's last token, float32 [V], by one forward pass without a cache."""
        seen = self.image_arguments(token_ids, images) if images else {}
        with torch.no_grad(), target_errors(self.target):
            output = self.causal_lm(self._padded([token_ids]), use_cache=False, logits_to_keep=1, **seen)
        return output.logits[0, 0].float()

    def frozen_products(self, token_ids: Sequence[int], vector: Sequence[float]) -> FrozenProducts:
        """Return the products of ``vector`` with the tokens' embeddings, and the tokens' logits for it."""
        embedding = self.causal_lm.get_input_embeddings()
        vector_H = torch.tensor(vector, dtype=self.dtype, device=self.device)
        ids_T = torch.tensor(token_ids, device=self.device)
        with torch.no_grad(), target_errors(self.target):
            embedded_T = embedding(ids_T).float() @ vector_H.float()
            logits_V = self.causal_lm.get_output_embeddings()(vector_H)
        dtype = str(self.dtype).removeprefix("torch.")
        return FrozenProducts(
            embedding=tuple(embedded_T.tolist()),
            head=tuple(logits_V[ids_T].tolist()),
            dtypes=(dtype, dtype),
        )

    def is_finite(self) -> bool:
        """Return whether the target computes finite states."""
        schema = FeatureSchema(
            layers=(self.target.num_layers,), hidden_size=self.target.hidden_size, dtype="float32"
        )
        return bool(self.states([[0, 1]], schema)[0].isfinite().all())

    def unrewindable_layers(self) -> list[str]:
        """Return the kinds of layers whose cache cannot drop rejected tokens; most targets have no such layer."""
        kinds = getattr(self.causal_lm.config.get_text_config(), "layer_types", None) or ()
        return sorted(set(kinds) - _REWINDABLE)

    @cached_property
    def takes_positions(self) -> bool:
        """Whether a forward pass takes its tokens' positions. Otherwise the attention mask determines them."""
        return "position_ids" in self._forward_arguments

    @cached_property
    def cache_argument(self) -> str:
        """Name of the argument by which a forward pass takes its KV cache: ``cache`` since Transformers 5.24."""
        return "cache" if "cache" in self._forward_arguments else "past_key_values"

    @cached_property
    def _forward_arguments(self) -> frozenset[str]:
        return frozenset(inspect.signature(self.causal_lm.forward).parameters)

    @cached_property
    def counts_positions(self) -> bool:
        """Whether attention depends on positions alone; unused cache columns may then lie between tokens."""
        config = self.causal_lm.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ())
        windows = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
        return self.takes_positions and kinds <= {"full_attention"} and not any(windows)

    def _padded(self, rows: Sequence[Sequence[int]]) -> Tensor:
        padded_BT = torch.zeros(len(rows), max(1, *(len(row) for row in rows)), dtype=torch.int64)
        for index, row in enumerate(rows):
            padded_BT[index, : len(row)] = torch.tensor(row, dtype=torch.int64)
        return padded_BT.to(self.device)

    def _check_head(self) -> None:
        """Raise TargetError if the model computes other logits than its config.json implies (TargetSpec)."""
        if self.target.norm == "layer" or self.target.head_bias_name is not None:
            return  # every draft refuses such a target
        norm_H = self._norm.weight.detach()
        tensors = TargetTensors(
            embedding_VH=self.causal_lm.get_input_embeddings().weight.detach(),
            head_VH=self.causal_lm.get_output_embeddings().weight.detach(),
            norm_H=1 + norm_H.float() if self.target.norm == "rms_plus_one" else norm_H,
        )
        states: list[Tensor] = []
        ids_BT = self._padded([range(min(8, self.target.vocab_size))])
        taps = self.tapped((self.target.num_layers,), lambda _, state_BTH: states.append(state_BTH[0]))
        with torch.no_grad(), taps, target_errors(self.target):
            logits_RV = self.causal_lm(ids_BT, use_cache=False).logits[0].float()
        expected_RV = TargetOps(self.target, tensors, self.device, self.dtype).teacher_logits(states[0])
        if (expected_RV - logits_RV).abs().max() > _HEAD_TOLERANCE * logits_RV.abs().max():
            raise TargetError(
                f"target {self.target.folder}: model_type {self.target.model_type!r} computes other logits than its "
                f"config.json says (norm {self.target.norm}, logit scale {self.target.logit_scale}, soft-cap "
                f"{self.target.logit_softcap}); this architecture's head cannot be expressed"
            )


def _load(target: TargetSpec, dtype: torch.dtype) -> Any:
    hide_broken_extensions()
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils import logging as transformers_logging

    # A progress bar for each load would disturb the run's own bar; missing weights are reported below.
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity(transformers_logging.CRITICAL)
    with foreign_errors(TargetError, f"transformers cannot load target {target.folder}"):
        sees = target.image_token_id is not None
        model, info = (AutoModelForImageTextToText if sees else AutoModelForCausalLM).from_pretrained(
            target.folder,
            dtype=dtype,
            local_files_only=True,
            output_loading_info=True,
            trust_remote_code=False,
        )
    if info["missing_keys"]:
        raise TargetError(
            f"target {target.folder} has no weights for {', '.join(sorted(info['missing_keys'])[:3])}"
        )
    return model.eval().requires_grad_(False)


def _find_stack(causal_lm: nn.Module, target: TargetSpec) -> tuple[nn.Module, nn.ModuleList, nn.Module]:
    """Return the model without its head, its decoder layers, and its final norm.

    They are found by the structure of the module, not by names.
    """
    norm_leaf = target.norm_name.split(".")[-2]
    found = [
        (owner, child, owner.get_submodule(norm_leaf))
        for owner in causal_lm.modules()
        for child in owner.children()
        if isinstance(child, nn.ModuleList)
        and len(child) == target.num_layers
        and norm_leaf in dict(owner.named_children())
    ]
    if len(found) != 1:
        raise EngineError(
            f"target {target.folder}: expected one stack of {target.num_layers} layers next to {norm_leaf!r} in "
            f"{type(causal_lm).__name__}, found {len(found)}; this architecture cannot be captured"
        )
    return found[0]


@contextmanager
def target_errors(target: TargetSpec) -> Iterator[None]:
    """Turn the errors that Transformers raises in a forward pass into EngineError."""
    try:
        yield
    except (RuntimeError, IndexError, ValueError, TypeError, AttributeError) as error:
        raise EngineError(f"target {target.folder} failed in a forward pass: {error}") from error
