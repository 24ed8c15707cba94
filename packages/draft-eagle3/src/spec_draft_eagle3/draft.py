"""Eagle3Draft is the draft plugin. This module does not import torch; ``model.py`` has the network."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

from spec_core.errors import ArtifactError, ConfigError
from spec_core.records import FeatureSchema, ShardHints
from spec_draft_eagle3.config import Eagle3Config
from spec_draft_eagle3.mla_shape import LATENT_SIZES, MLA_ARCHITECTURE, MlaShape
from spec_draft_eagle3.shape import ARCHITECTURE, QWEN3_ARCHITECTURE, Eagle3Shape
from spec_kit.chain_drafting import ChainDraft
from spec_kit.drafting import (
    TEACHER,
    TRAINED,
    DraftCheckpoint,
    StepCost,
    architectures,
    as_served,
    num_weights,
    parallel_mask_token,
    section,
)
from spec_kit.sharding import TensorParallelHints

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor, nn

    from spec_core import DraftConfig, Proposer, TargetSpec, TargetTensors, VocabularyOps
    from spec_core.records import Supervision
    from spec_kit.chain_drafting import ChainKernels
    from spec_kit.drafting import Json


_MLA_NAMES = {MLA_ARCHITECTURE, "Eagle3DeepseekV3ForCausalLM"}
"""Architectures with multi-head latent attention; vLLM knows the draft by both names."""


class Eagle3Draft(ChainDraft[Eagle3Config, Eagle3Shape]):
    """EAGLE-3 (arXiv 2503.01840) with training-time test; see ``spec_core.draft`` for the contract."""

    name: ClassVar[str] = "eagle3"
    api_version: ClassVar[int] = 1
    Config: ClassVar[type[DraftConfig]] = Eagle3Config
    Shape = Eagle3Shape
    architecture: ClassVar[str] = ARCHITECTURE
    speculators_type: ClassVar[str] = "eagle3"
    speculators_architecture: ClassVar[str] = "Eagle3DraftModel"
    depth_option: ClassVar[str] = "num_steps"
    small_run: ClassVar[Mapping[str, object]] = {"num_steps": 3, "step_decay": 1.0}
    learns_from_guesses: ClassVar[bool] = True
    serving_methods: ClassVar[Mapping[str, str]] = {
        "vllm": "eagle3",
        "sglang": "EAGLE3",
        "llamacpp": "draft-eagle3",
    }

    def __init__(self, config: DraftConfig) -> None:
        """Make the draft and decide which engines can serve it.

        Serving a draft of several layers with SGLang is not supported, because it was never tried; it reads neither
        ``norm_before_residual`` nor norms of queries and keys. vLLM cannot serve a draft that reads the target's
        embeddings of images. llama.cpp has neither several layers nor these embeddings, no window, no latent
        attention, and of the norms ``norm_before_residual`` alone. Raise ConfigError if an option belongs to a
        kind of attention that the draft does not have.
        """
        super().__init__(config)
        _check_attention(self.options, is_fresh=self.checkpoint is None)
        several = (self.options.num_layers or 1) > 1
        windowed = self.options.sliding_window is not None
        unable = {
            "sglang": several or self.options.norm_before_residual or self.options.qk_norm,
            "vllm": self.merges_images,
            "llamacpp": several or windowed or self.merges_images or not self._is_original,
        }
        self.serving_methods = {
            name: method for name, method in self.serving_methods.items() if not unable.get(name)
        }

    @property
    def _is_original(self) -> bool:
        """Whether the draft is as in EAGLE 3: without later norms and kinds of attention, from three layers."""
        options = self.options
        norms = (options.fc_norm, options.norm_output, options.norm_before_fc, options.qk_norm)
        captured = options.layers if self.checkpoint is None else self.checkpoint.shape.captured
        three = captured is None or len(captured) == 3
        return three and options.attention == "gqa" and not any(norms)

    @property
    def merges_images(self) -> bool:
        """Whether the draft reads the target's embeddings of images, not the placeholder token's embedding."""
        trained = None if self.checkpoint is None else self.checkpoint.shape.images
        return (self.options.image_embeddings or trained) == "merged"

    @classmethod
    def is_own(cls, fields: Json) -> bool:
        """Return whether config.json describes an Eagle3 draft.

        EAGLE's own files are recognised by their draft vocabulary. A draft with the same layers and a mask
        token is P-EAGLE, which guesses all tokens in one pass, and not Eagle3.
        """
        if parallel_mask_token(fields) is not None:
            return False
        named = architectures(fields)
        unnamed = "LlamaForCausalLM" in named and "draft_vocab_size" in fields
        others = _MLA_NAMES | {"Eagle3LlamaForCausalLM", QWEN3_ARCHITECTURE}
        return super().is_own(fields) or not named.isdisjoint(others) or unnamed

    @classmethod
    def shape_type(cls, fields: Json) -> type[Eagle3Shape]:
        """Return the shape class for the kind of attention that the architecture's name implies."""
        return Eagle3Shape if architectures(fields).isdisjoint(_MLA_NAMES) else MlaShape

    @classmethod
    def speculators_fields(cls, fields: Json, folder: Path) -> Json:
        """Return the fields of a ``speculators`` config.json, under the names that engines read.

        As in vLLM, the residual starts behind the norm if config.json does not say it.
        """
        served = {"norm_before_residual": True} | super().speculators_fields(fields, folder)
        is_qwen3 = section(fields, "transformer_layer_config", folder).get("model_type") == "qwen3"
        return served | ({"architectures": [QWEN3_ARCHITECTURE]} if is_qwen3 else {})

    @classmethod
    def module_name(cls, stored_name: str) -> str:
        """Return a stored tensor's name in the module.

        Published drafts may call the first layer ``layers.0``.
        """
        name = super().module_name(stored_name)
        return f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name

    @classmethod
    def check_checkpoint(cls, checkpoint: DraftCheckpoint[Eagle3Shape]) -> None:
        """Raise ArtifactError if the vocabulary mapping is invalid or an input has two different norms."""
        super().check_checkpoint(checkpoint)
        _check_copies(checkpoint)

    def fresh_shape(self, target: TargetSpec) -> Eagle3Shape:
        """Return the shape of a new draft, from the options and the target's sizes."""
        options = self.options
        shape = MlaShape if options.attention == "mla" else Eagle3Shape
        return shape.for_target(
            options,
            target,
            num_layers=options.num_layers or 1,
            vocab_size=options.vocab_size or target.vocab_size,
            captured=options.layers,
            fc_norm=bool(options.fc_norm),
            norm_output=bool(options.norm_output),
            norm_before_residual=bool(options.norm_before_residual),
            norm_before_fc=bool(options.norm_before_fc),
            qk_norm=bool(options.qk_norm),
            sliding_window=options.sliding_window,
        )

    def target_problem(self, target: TargetSpec) -> str | None:
        """Return why the captured layers, the window or the images are invalid for the draft, or None."""
        window = self.shape(target).sliding_window
        steps = self.options.num_steps
        if window is not None and window <= steps:
            return f"its sliding_window={window} must be above draft.num_steps={steps}"
        return super().target_problem(target) or self._image_problem(target)

    def _image_problem(self, target: TargetSpec) -> str | None:
        """Return why the draft cannot read the target's embeddings of images, or None."""
        if not self.merges_images:
            return None
        if target.image_token_id is None:
            reason = "the target sees no images"
        elif target.embedding_scale != 1:
            # Neither this draft nor engines scale the embeddings that the draft reads.
            reason = "the target scales the embeddings of text, and the draft does not"
        else:
            return None
        return f"image_embeddings=merged: {reason}; set draft.image_embeddings=placeholder"

    def required_features(self, target: TargetSpec) -> FeatureSchema:
        """Return the captured layers that feed the draft, and the input of the final norm for the teacher.

        If the draft reads the target's embeddings of images, the first captured state is the input of layer
        0.
        """
        schema = super().required_features(target)
        return replace(schema, layers=(0, *schema.layers)) if self.merges_images else schema

    def denominators(self, supervision: Sequence[Supervision]) -> Tensor:
        """Return for each of the S steps the number of supervised tokens that it trains on, float64 [S].

        Step s trains on the supervised tokens that follow at least s + 2 tokens of their document. If a
        sample records at which depth each token was guessed, step s counts only tokens of depth s + 1. With
        ``opd``, accepted guesses and refused ones are counted apart, float64 [2 S].
        """
        from spec_kit.chain_drafting import count_judged, count_labels

        count = count_judged if self.options.opd else count_labels
        return count(supervision, self.options.num_steps)

    def step_cost(self, target: TargetSpec) -> StepCost:
        """Return the cost of a sample (D15).

        For every token, ``fc`` and the keys, values and attention of step 0 are computed. A supervised token
        goes through the layers and the head once in each step. All layers but the last process every token
        once.
        """
        shape = self.shape(target)
        steps = self.options.num_steps
        weights = shape.tensor_shapes()
        inputs = prod(weights.pop("fc.weight")) + num_weights(
            size for name, size in weights.items() if ".self_attn.k" in name or ".self_attn.v" in name
        )
        earlier = num_weights(size for name, size in weights.items() if name.startswith("layers."))
        width = shape.num_layers * shape.num_heads * shape.cache_shape[1]
        return StepCost(
            per_token=TRAINED * (inputs + earlier),
            per_row=TRAINED * steps * num_weights(weights.values())
            + TEACHER * target.vocab_size * target.hidden_size,
            token_channels=width,
            row_channels=(steps - 1) * width,
        )

    def saved_values(self, target: TargetSpec) -> Callable[[int, int], int]:
        """Return a function that computes how many values a forward pass saves for the backward pass.

        The result is a lower bound. It counts only the unrolled steps of a sample's supervised tokens.
        """
        shape = self.shape(target)
        options = self.options
        heads, key_width = shape.cache_shape
        cached = heads * (key_width + shape.value_width)
        values = shape.hidden_size + cached + shape.inner_values * (not options.checkpoint_activations)
        row = options.num_steps * (shape.num_layers * values + 2 * shape.hidden_size)
        return lambda _, num_supervised: row * num_supervised

    @classmethod
    def kernels(cls) -> type[ChainKernels]:
        """Return the kernels that the draft can use (D10)."""
        from spec_kit.chain_drafting import ChainKernels

        return ChainKernels

    def new_module(self, target: TargetSpec, tensors: TargetTensors, kernels: ChainKernels) -> nn.Module:
        """Return the network with random weights."""
        from spec_draft_eagle3.model import Eagle3Model

        merged = target.image_token_id if self.merges_images else None
        return Eagle3Model(self.shape(target), self.options, kernels, merged)

    def exported_config(self, target: TargetSpec) -> dict[str, Any]:
        """Return the fields of config.json; for a multimodal target also ``image_embeddings`` (D8)."""
        kind = "merged" if self.merges_images else "placeholder"
        images = {} if target.image_token_id is None else {"image_embeddings": kind}
        return super().exported_config(target) | images

    def exported_tensors(
        self, weights: Mapping[str, Tensor], target: TargetSpec
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the trained tensors, the vocabulary mapping of a reduced vocabulary, and copies of norms (D8)."""
        yield from super().exported_tensors(weights, target)
        for name, source in self.shape(target).norm_copies.items():
            yield name, as_served(weights[source], target).clone()  # else both names would share memory

    def shard_hints(self, target: TargetSpec) -> ShardHints:
        """Return how tensor-parallel ranks divide the layers, the head, and ``fc`` along its inputs.

        Context-parallel ranks divide the tokens of the batch.
        """
        shape = self.shape(target)
        own = TensorParallelHints(
            each_token=("norm", "midlayer.hidden_norm"),
            all_tokens_in={"midlayer.input_layernorm": 0, "rank_rows": 0},
            all_tokens_out=("head_input", "whole_rows"),
        )
        layers = ["midlayer", *(f"layers.{index}" for index in shape.later_layers)]
        hints = sum(map(shape.layer_hints, layers), own + shape.norm_hints("midlayer.normed_state"))
        hints += shape.input_and_head_hints()
        return ShardHints(tensor_parallel=hints, vocabulary=("lm_head",), context_parallel=True)

    def proposer(self, module: nn.Module, ops: VocabularyOps) -> Proposer:
        """Return a new proposer for one sequence (D9)."""
        from spec_draft_eagle3.model import Eagle3Model
        from spec_draft_eagle3.proposer import ChainProposer

        assert isinstance(module, Eagle3Model)
        return ChainProposer(module, ops)


_GROUPED = ("num_kv_heads", "head_dim", "norm_before_fc", "qk_norm")
"""Options that a draft with latent attention does not have; engines know no such norms beside it."""


def _check_attention(options: Eagle3Config, *, is_fresh: bool) -> None:
    """Raise ConfigError if an option belongs to a kind of attention that the draft does not have.

    ``is_fresh``: whether the draft starts without a folder, whose draft would determine the kind of
    attention.
    """
    mla = options.attention == "mla"
    for key in (_GROUPED if is_fresh else ()) if mla else LATENT_SIZES:
        if value := getattr(options, key):
            raise ConfigError(
                f"draft.{key}={value} does not go with draft.attention={options.attention}; remove it, or set "
                f"draft.attention={'gqa' if mla else 'mla'}"
            )


def _check_copies(checkpoint: DraftCheckpoint[Eagle3Shape]) -> None:
    """Raise ArtifactError if a folder has two different norms for one input.

    Engines differ in which of the two norms they use.
    """
    import torch

    for name, source in checkpoint.shape.norm_copies.items():
        if name not in checkpoint.stored_names:
            continue
        stored = checkpoint.load(name, source)
        if not torch.equal(stored[name], stored[source]):
            raise ArtifactError(
                f"draft {checkpoint.folder}: {name} differs from {source}: vLLM would norm by the second, SGLang by "
                "the first; store the one that was trained under both names"
            )
