"""ChainDraft is the base class of drafts with EAGLE-3's inputs and head; importing it imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from spec_core.records import FeatureSchema
from spec_kit.chain_drafting.chain_shape import ChainConfig, ChainShape
from spec_kit.drafting import ServedDraft
from spec_kit.drafting.draft_shape import layer_range_problem

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from spec_core import TargetSpec, TargetTensors
    from spec_kit.drafting import Json

C = TypeVar("C", bound=ChainConfig)
S = TypeVar("S", bound=ChainShape)

_SPECULATORS_FIELDS = (
    "draft_vocab_size",
    "target_hidden_size",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "eagle_aux_hidden_state_layer_ids",
)


class ChainDraft(ServedDraft[C, S]):
    """A draft that reads captured layers of the target through ``fc``, and guesses with a head of its own.

    EAGLE-3 is arXiv 2503.01840. The vocabulary of the head may be reduced.
    """

    may_lack_head: ClassVar[bool] = True  # folders of Model-Optimizer do
    quantised_modules = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

    @classmethod
    def speculators_fields(cls, fields: Json, folder: Path) -> Json:
        """Return the fields of a ``speculators`` config.json, under the names that engines read.

        As in vLLM, id k of a captured layer means the input of target layer k.
        """
        own = {name: fields[name] for name in _SPECULATORS_FIELDS if name in fields}
        return {"architectures": [cls.architecture]} | own

    @classmethod
    def to_speculators(cls, served: Json) -> Json:
        """Return the fields that ``speculators_fields`` reads, which are the same in both layouts."""
        return {name: served[name] for name in _SPECULATORS_FIELDS if name in served}

    def target_problem(self, target: TargetSpec) -> str | None:
        """Return why the captured layers are invalid for the target, or None."""
        shape = self.shape(target)
        wanted = self.options.layers
        if shape.captured is None and target.num_layers < 7:
            return (
                f"it has {target.num_layers} layers, at least 7 are needed unless draft.layers names others"
            )
        layers = shape.layer_ids(target.num_layers)
        if wanted not in (None, layers):
            return f"draft.layers={list(wanted)} contradicts draft.init_from, whose layers are {list(layers)}"
        return layer_range_problem(layers, target)

    def required_features(self, target: TargetSpec) -> FeatureSchema:
        """Return the captured layers that feed the draft, and the input of the final norm for the teacher."""
        layers = (*self.shape(target).layer_ids(target.num_layers), target.num_layers)
        return FeatureSchema(layers=layers, hidden_size=target.hidden_size, dtype=target.dtype)

    def initialize(
        self, module: Any, target: TargetSpec, tensors: TargetTensors, token_counts: Tensor | None
    ) -> None:
        """Scale the random weights, and copy the head and the final norm from the target."""
        from spec_kit.layers.initial_weights import start_from_target

        start_from_target(module, target, tensors, token_counts)
