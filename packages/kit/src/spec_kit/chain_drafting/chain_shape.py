"""Define options, sizes and config.json of drafts with EAGLE-3's inputs and head; importing this imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from spec_core import TargetSpec
from spec_kit.drafting import (
    DecoderConfig,
    DistilledLoss,
    Json,
    Shapes,
    Size,
    checked,
    config_error,
    decoder_fields,
    end_fields,
    head_fields,
)
from spec_kit.drafting.decoder_shape import CapturedLayers
from spec_kit.drafting.draft_shape import read_layers
from spec_kit.drafting.vocabulary_shape import VocabularyShape
from spec_kit.sharding import TensorParallelHints

_FULL, _SLIDING = "full_attention", "sliding_attention"
_LAYERS = "eagle_aux_hidden_state_layer_ids"
_ANGELSLIM_LAYERS = "aux_hidden_states_layer_ids"
"""Field of AngelSlim's config.json: layers whose outputs are captured. No engine reads it."""


class ChainConfig(DecoderConfig):
    """Options of a draft that guesses chains.

    An option that is None takes its value from the draft in the folder ``init_from``. Without a folder it
    takes the default named below. A run whose options contradict the folder is refused.
    """

    speed_only: ClassVar[frozenset[str]] = frozenset({"checkpoint_activations"})

    loss: DistilledLoss = "ce"
    """``ce``: cross-entropy to the target's distribution. ``lk_alpha``: −log of the expected acceptance.
    ``lk_lambda``: a weighted sum of KL divergence and probability of rejection; the more guesses are accepted, the
    less KL weighs (arXiv 2602.23881)."""
    checkpoint_activations: bool = False
    """Whether to compute each layer again in the backward pass instead of storing its activations. This saves
    memory and costs one more forward pass of the layers; results stay the same."""
    vocab_size: int | None = Field(None, ge=2)
    """Size of the draft's vocabulary, which is the most frequent supervised tokens. None means the target's
    whole vocabulary."""
    norm_before_residual: bool | None = Field(None, exclude_if=lambda switch: switch is None)
    """Whether the first layer's residual connection starts from the normed hidden state, as in drafts of
    speculators. SGLang serves no such draft. None means no."""
    norm_before_fc: bool | None = Field(None, exclude_if=lambda switch: switch is None)
    """Whether all captured states together go through one RMS norm before ``fc``, as in drafts of speculators.
    llama.cpp serves no such draft. None means no."""
    layers: CapturedLayers | None = Field(None, min_length=1)
    """Ids of the target's residual streams that feed the draft; id k is the input of target layer k. None
    means 2, N // 2 and N − 3 for a target of N layers."""


class ChainShape(VocabularyShape):
    """The sizes of one draft that guesses chains."""

    nested: ClassVar[str] = "eagle_config"

    captured: tuple[int, ...] | None
    """Ids of the target layers whose input states are captured; None means the three default layers."""
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    sliding_window: Size | None = None
    """Number of positions to which a query of every layer attends, its own included; None means all."""

    @property
    def num_captured(self) -> int:
        """Number of captured layers that feed the draft."""
        return 3 if self.captured is None else len(self.captured)

    def layer_ids(self, num_target_layers: int) -> tuple[int, ...]:
        """Return the ids of the captured layers: the residual streams that enter these layers of the target."""
        n = num_target_layers
        return (2, n // 2, n - 3) if self.captured is None else self.captured

    def input_and_head_shapes(self) -> Shapes:
        """Return name and shape of the tensors before and after the layers."""
        width = self.hidden_size
        inputs = self.num_captured * width
        return {
            **({"input_norm.weight": (inputs,)} if self.norm_before_fc else {}),
            "fc.weight": (width, inputs),
            "norm.weight": (width,),
            "lm_head.weight": (self.vocab_size, width),
        }

    def input_and_head_hints(self) -> TensorParallelHints:
        """Return how tensor-parallel ranks divide the head, and ``fc`` along its inputs."""
        own = TensorParallelHints(
            columns={"lm_head": self.vocab_size},
            rows={"fc": self.num_captured * self.hidden_size},
            whole_inputs=("fc",),
            leaves=("fc",),
        )
        return own + self.vocabulary_hints()

    @classmethod
    def read_own(cls, fields: Json, own: Json, folder: Path) -> Json:
        """Return ``captured``, ``norm_before_fc`` and the window, beside what every decoder layer reads.

        At the top level of config.json (``fields``), the number k means the input of layer k. In the nested
        section (``own``), k − 1 means the same state, as the output of layer k − 1. Engines read ``norm_before_fc``
        in either place.
        """
        outputs = (own, _LAYERS) if own.get(_LAYERS) else (fields, _ANGELSLIM_LAYERS)
        layers = read_layers((fields, _LAYERS), outputs, folder)
        joined = own.get("norm_before_fc", fields.get("norm_before_fc", False))
        found = {"captured": layers, "norm_before_fc": joined, "sliding_window": _read_window(fields, folder)}
        return super().read_own(fields, own, folder) | found

    def fixed_fields(self) -> Json:
        """Return fields of a published draft's config.json for which only the given value is supported."""
        return super().fixed_fields() | {
            "bias": False,
            "use_aux_hidden_state": True,
            **({} if self.captured is None else {"num_aux_hidden_states": len(self.captured)}),
        }

    def chain_fields(
        self, architecture: str, model_type: str, target: TargetSpec, *, num_layers: int, norms: Json
    ) -> Json:
        """Return the fields of config.json that both engines read. ``norms``: further fields, about norms.

        ``draft_vocab_size`` is always written: SGLang needs it, and takes null as 'use the target's head'. If
        the vocabulary is not reduced, it equals the target's vocabulary size, and both engines take a row's
        index as its token id because d2t is absent. The captured layers are written in both conventions: vLLM
        reads the top-level list first (streams *entering* layer k), SGLang the nested list (*outputs* of
        layer k − 1).
        """
        layers = self.layer_ids(target.num_layers)
        return {
            **head_fields(architecture, model_type, target),
            "draft_vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "target_hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": num_layers,
            **decoder_fields(self),
            **({} if (window := self.sliding_window) is None else _window_fields(window, num_layers)),
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "norm_before_residual": self.norm_before_residual,
            "norm_before_fc": self.norm_before_fc,
            **norms,
            **end_fields(self, target),
            "num_aux_hidden_states": len(layers),
            _LAYERS: list(layers),
            "eagle_config": {"use_aux_hidden_state": True, _LAYERS: [layer - 1 for layer in layers]},
        }


def _window_fields(window: int, num_layers: int) -> Json:
    """Return the fields of config.json for a window in every layer, of which vLLM reads the first two."""
    return {
        "layer_types": [_SLIDING] * num_layers,
        "sliding_window": window,
        "use_sliding_window": True,
    }


def _read_window(fields: Json, folder: Path) -> int | None:
    """Return the window of a draft's layers as vLLM reads it, or None. Raise ArtifactError if the layers differ."""
    kinds = set(checked(tuple[str, ...], fields.get("layer_types") or [_FULL], folder, "layer_types"))
    if kinds == {_FULL}:
        return None
    if kinds != {_SLIDING}:
        raise config_error(folder, f"layer_types={sorted(kinds)}, expected one kind, {_FULL} or {_SLIDING}")
    return checked(Size, fields.get("sliding_window"), folder, "sliding_window")
