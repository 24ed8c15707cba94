"""BlockDraft is the base class of draft plugins that guess blocks; importing it imports no torch."""

from __future__ import annotations

from abc import abstractmethod
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

from spec_core.records import FeatureSchema, ShardHints
from spec_kit.block_drafting.block_shape import FULL, SLIDING, BlockConfig, BlockShape, default_layers
from spec_kit.block_drafting.mask_token import choose_mask_token
from spec_kit.drafting import (
    FROZEN,
    TEACHER,
    TRAINED,
    ServedDraft,
    StepCost,
    as_served,
    num_weights,
    section,
)
from spec_kit.drafting.served_draft import EMBEDDING, HEAD
from spec_kit.targets import read_target_tensors
from spec_kit.targets.rope_parameters import draft_rope

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from spec_core import Proposer, TargetSpec, TargetTensors, VocabularyOps
    from spec_core.records import Supervision
    from spec_kit.block_drafting.backbone import BlockBackbone
    from spec_kit.block_drafting.blocks import BlockRule
    from spec_kit.block_drafting.kernels import BlockKernels
    from spec_kit.block_drafting.proposer import BlockProposer
    from spec_kit.drafting import Json

_KEYS_VALUES = ("k_proj.weight", "v_proj.weight")
C = TypeVar("C", bound=BlockConfig)
S = TypeVar("S", bound=BlockShape)


class BlockDraft(ServedDraft[C, S]):
    """A draft of Qwen3-style layers that guesses blocks and uses the target's head, such as DFlash.

    DFlash is arXiv 2602.06036.
    """

    # vLLM 0.28 takes the stored matrices of keys and values for their weights (``_build_context_kv_buffers``).
    quantised_modules = ("o_proj", "gate_proj", "up_proj", "down_proj")

    @classmethod
    def speculators_fields(cls, fields: Json, folder: Path) -> Json:
        """Return the fields of a ``speculators`` config.json under the names that engines read.

        Layer k of the captured layers means the input of target layer k. Sliding layers are causal inside a block
        only if ``sliding_window_non_causal`` is false, as in vLLM; full layers never are.
        """
        same = ("draft_vocab_size", "target_hidden_size", "block_size")
        nested = {name: fields[name] for name in ("mask_token_id", "sample_from_anchor") if name in fields}
        kinds = section(fields, "transformer_layer_config", folder).get("layer_types") or ()
        if SLIDING in kinds and fields.get("sliding_window_non_causal", True):
            nested["causal"] = False
        return {
            "architectures": [cls.architecture],
            **{name: fields[name] for name in same if name in fields},
            "eagle_aux_hidden_state_layer_ids": fields.get("aux_hidden_state_layer_ids"),
            cls.Shape.nested: nested,
        }

    @classmethod
    def to_speculators(cls, served: Json) -> Json:
        """Return an export's fields as speculators' config names them, the inverse of ``speculators_fields``.

        That config can say causality inside a block of sliding layers only.
        """
        own = served[cls.Shape.nested]
        return {
            "draft_vocab_size": served.get("draft_vocab_size", served["vocab_size"]),
            "target_hidden_size": served["hidden_size"],
            "block_size": served["block_size"],
            "aux_hidden_state_layer_ids": [layer + 1 for layer in own["target_layer_ids"]],
            "mask_token_id": own["mask_token_id"],
            "sample_from_anchor": False,
            "sliding_window_non_causal": not served.get("is_causal", True),  # without it, some layers are
        }

    def reduced(self, vocab_size: int | None) -> bool:
        """Return whether the vocabulary is reduced, by the folder ``init_from`` or the option ``vocab_size``."""
        return vocab_size is not None if self.checkpoint is None else self.checkpoint.shape.reduced

    @property
    def looks_both_ways(self) -> bool:
        """Whether all layers have full attention that is not causal inside a block."""
        made = self.checkpoint is None or self.checkpoint.shape.is_causal is False
        return made and self.options.sliding_window is None

    @property
    @abstractmethod
    def num_guesses(self) -> int:
        """Number of guesses in one block."""

    @property
    @abstractmethod
    def guess_weights(self) -> Tensor:
        """Weight that each counted guess of a block adds to a denominator of the loss, float64 [S].

        A loss with D denominators has the weights [S, D], of which the first are those of the places.
        """

    @property
    def needs_teacher(self) -> bool:
        """Whether the loss needs the target's distributions."""
        return True

    @classmethod
    @abstractmethod
    def network(cls) -> tuple[type[BlockBackbone], type[BlockProposer]]:
        """Return the class of the module and the class of its proposers, which import torch."""

    @classmethod
    def kernels(cls) -> type[BlockKernels]:
        """Return the kernels that the draft can use (D10)."""
        from spec_kit.block_drafting.kernels import BlockKernels

        return BlockKernels

    def new_module(self, target: TargetSpec, tensors: TargetTensors, kernels: Any) -> BlockBackbone:
        """Return the network with random weights."""
        module_type, _ = self.network()
        return module_type(self.shape(target), self.options, target.embedding_scale, kernels)

    def proposer(self, module: Any, ops: VocabularyOps) -> Proposer:
        """Return a new proposer for one sequence (D9)."""
        _, proposer_type = self.network()
        return proposer_type(module, ops, self.num_guesses)

    @property
    def rule(self) -> BlockRule:
        """The rule by which the blocks of a document are drawn."""
        from spec_kit.block_drafting.blocks import BlockRule

        return BlockRule(self.options, self.num_guesses)

    def fresh_fields(self, target: TargetSpec) -> dict[str, Any]:
        """Return fields of a fresh draft's shape.

        They come from the options, or else from the DFlash paper's defaults and the target's sizes.
        """
        options = self.options
        mask_token_id = options.mask_token_id
        kind = FULL if options.sliding_window is None else SLIDING
        return {
            "layer_types": (kind,) * (options.num_layers or 5),
            "sliding_window": options.sliding_window,
            "mask_token_id": choose_mask_token(target) if mask_token_id is None else mask_token_id,
            "layers": options.layers or default_layers(target.num_layers, options.num_features or 5),
            "num_target_layers": target.num_layers,
            "rope": draft_rope(target.rope),
        }

    def target_problem(self, target: TargetSpec) -> str | None:
        """Return what is wrong with the target's head or with the captured layers, or None.

        Engines compute logits from the weights of the target's head without any scale.
        """
        if target.logit_scale != 1:
            return f"its head is scaled ({target.logit_scale}), a head without a scale is needed"
        return self.shape(target).layer_problem(target)

    def embedding_scale(self, target: TargetSpec) -> float:
        """Return the target's embedding scale, by which the exported embedding is already multiplied."""
        return target.embedding_scale

    def required_features(self, target: TargetSpec) -> FeatureSchema:
        """Return the schema of the captured layers, and of the final norm's input if the loss needs it."""
        layers = self.shape(target).layers
        if self.needs_teacher:
            layers = (*layers, target.num_layers)
        return FeatureSchema(layers=layers, hidden_size=target.hidden_size, dtype=target.dtype)

    def denominators(self, supervision: Sequence[Supervision]) -> Tensor:
        """Return float64 [D]: sums of the weights of all guesses that count in the loss.

        With ``opd``, the two numbers of ``judged_denominators`` follow.
        """
        import torch

        from spec_kit.block_drafting.judged_guesses import judged_denominators

        rule = self.rule
        weights = self.guess_weights
        reached = weights.cumsum(0)
        shares = [reached[rule.draw(sample)[1] - 1].sum(0) for sample in supervision]
        total = torch.atleast_1d(sum(shares, torch.zeros_like(reached[0])))
        if not self.options.opd:
            return total
        weight_S = weights.reshape(len(weights), -1)[:, 0]
        return torch.cat([total, judged_denominators(rule, weight_S, supervision)])

    def step_cost(self, target: TargetSpec) -> StepCost:
        """Return the cost of a sample (D15).

        Every token is context, with keys and values in each layer. A row of the StepCost is a block: its
        slots go through the layers, its guesses through the target's head. From ``num_anchors`` blocks on, a
        longer sample only has more context.
        """
        shape = self.shape(target)
        weights = shape.tensor_shapes()
        layers = num_weights(size for name, size in weights.items() if name.startswith("layers."))
        keys = num_weights(size for name, size in weights.items() if name.endswith(_KEYS_VALUES))
        head_rows = FROZEN * shape.vocab_size + TEACHER * self.needs_teacher * target.vocab_size
        windows = [window for window in shape.windows if window is not None]
        return StepCost(
            per_token=TRAINED * (prod(weights["fc.weight"]) + keys),
            per_row=shape.block_size * TRAINED * layers + self.num_guesses * head_rows * target.hidden_size,
            row_channels=shape.num_layers * shape.block_size * shape.num_heads * shape.head_dim,
            window=max(windows) if len(windows) == shape.num_layers else None,
            num_rows=self.options.num_blocks,
        )

    def saved_values(self, target: TargetSpec) -> Callable[[int, int], int]:
        """Return a function that computes how many values, at least, a forward pass saves for a sample.

        The function counts the values of the slots of the sample's blocks.
        """
        shape = self.shape(target)
        options = self.options
        values = shape.hidden_size + shape.inner_values * (not options.checkpoint_activations)
        block = shape.block_size * shape.num_layers * values
        return lambda _, num_supervised: block * options.num_blocks(num_supervised)

    def initialize(
        self, module: Any, target: TargetSpec, tensors: TargetTensors, token_counts: Tensor | None
    ) -> None:
        """Choose the vocabulary, and scale the target's final norm for the draft's final norm.

        The head is the target's, unchanged, or some of its rows.
        """
        from spec_kit.layers.initial_weights import first_norm

        ids_V = module.choose_vocabulary(target, token_counts)
        head_VH = tensors.head_VH
        head_VH = head_VH[ids_V] if self.shape(target).reduced else head_VH
        module.load_state_dict({"norm.weight": first_norm(tensors.norm_H, head_VH)}, strict=False)

    def exported_tensors(
        self, weights: Mapping[str, Tensor], target: TargetSpec
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the module's tensors, and copies of what engines do not take from the target.

        These are the head's rows of a reduced vocabulary, and a scaled embedding. Engines let the draft use the
        target's embedding: SGLang applies the target's scale, vLLM does not. The copy is for vLLM.
        """
        yield from super().exported_tensors(weights, target)
        if self.shape(target).reduced:
            yield HEAD, as_served(read_target_tensors(target).head_VH[weights["t2d"].cpu()], target)
        if target.embedding_scale != 1:
            scaled_VH = read_target_tensors(target).embedding_VH * target.embedding_scale
            yield EMBEDDING, as_served(scaled_VH, target)

    @property
    def max_draft_tokens(self) -> int | None:
        """Largest number of tokens to guess: the guesses of one block (D9)."""
        return self.num_guesses

    def shard_hints(self, target: TargetSpec) -> ShardHints:
        """Return the decoder layers as units of sharding, and the tensor-parallel division of the module.

        Context-parallel ranks divide the blocks and the tokens that these see.
        """
        shape = self.shape(target)
        hints = shape.parallel_hints()
        return ShardHints(blocks=shape.layer_names, tensor_parallel=hints, context_parallel=True)
