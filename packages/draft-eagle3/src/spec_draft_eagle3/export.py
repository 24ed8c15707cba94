"""A draft as stock vLLM and SGLang load it: the fields of config.json, and tensors of one layer without a prefix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spec_core.drafting.decoder_format import decoder_fields
from spec_core.drafting.served_draft import as_served, end_tokens, served_dtype
from spec_core.targets.rope_parameters import rope_fields
from spec_draft_eagle3.artifact import ARCHITECTURE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from spec_core.drafting.served_draft import Json
    from spec_core.target import TargetSpec
    from spec_draft_eagle3.shape import DraftShape


def served_tensors(
    weights: Mapping[str, Tensor], shape: DraftShape, target: TargetSpec
) -> Iterator[tuple[str, Tensor]]:
    """Yield the module's tensors in the dtype that they are served in; the vocabulary mapping as it is."""
    for name in (*shape.tensor_shapes(), *(("d2t", "t2d") if shape.reduced else ())):
        yield name, as_served(weights[name], served_dtype(target))


def served_config(shape: DraftShape, target: TargetSpec) -> Json:
    """Fields that both engines read. ``draft_vocab_size`` is always there: SGLang needs it, and takes null as 'use
    the target's head'. Without a reduced vocabulary it is the target's and there is no d2t: row = id for both."""
    dtype = served_dtype(target)
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "dtype": dtype,
        "torch_dtype": dtype,
        "vocab_size": shape.target_vocab_size,
        "draft_vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "target_hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        **decoder_fields(shape),
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": shape.fc_norm,
        "norm_output": shape.norm_output,
        **end_tokens(target),
        **rope_fields(shape.rope),
        **_layer_fields(shape, target),
    }


def _layer_fields(shape: DraftShape, target: TargetSpec) -> Json:
    """The captured layers in both conventions: vLLM reads the top-level list (streams *entering* layer k) first,
    SGLang the nested one (*outputs* of layer k − 1)."""
    layers = shape.layer_ids(target.num_layers)
    nested = {
        "use_aux_hidden_state": True,
        "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in layers],
    }
    return {
        "num_aux_hidden_states": len(layers),
        "eagle_aux_hidden_state_layer_ids": list(layers),
        "eagle_config": nested,
    }
