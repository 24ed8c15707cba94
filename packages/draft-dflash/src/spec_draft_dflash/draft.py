"""DFlashDraft: the plugin. Imports without torch; the network is in ``model.py``."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from spec_core.errors import ArtifactError
from spec_core.records import FeatureSchema, ShardHints, TensorParallelHints
from spec_draft_dflash.config import DFlashConfig
from spec_draft_dflash.mask_token import choose_mask_token
from spec_draft_dflash.shape import ARCHITECTURE, FULL, SLIDING, DFlashShape, default_layers
from spec_kit.drafting import EMBEDDING, DraftCheckpoint, ServedDraft, as_served, section
from spec_kit.targets import read_target_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor, nn

    from spec_core import DraftConfig, Proposer, TargetSpec, TargetTensors, VocabularyOps
    from spec_core.records import Supervision
    from spec_draft_dflash.kernels import DFlashKernels
    from spec_draft_dflash.model import DFlashModel
    from spec_kit.drafting import Json

_MASK_FILE = "mask_embedding.pt"
# Which channels turn, and by what for images. SGLang 0.5.16 turns all channels whatever a DFlash config says, so a
# fresh draft does; a draft sees text positions only.
_ROPE_NOT_COPIED = frozenset({"partial_rotary_factor", "rope_dim", "mrope_section", "mrope_interleaved"})


class DFlashDraft(ServedDraft[DFlashConfig, DFlashShape]):
    """DFlash (arXiv 2602.06036): a block of tokens in one pass; see ``spec_core.draft`` for the contract."""

    name: ClassVar[str] = "dflash"
    api_version: ClassVar[int] = 2
    Config: ClassVar[type[DraftConfig]] = DFlashConfig
    Shape = DFlashShape
    architecture: ClassVar[str] = ARCHITECTURE
    speculators_type: ClassVar[str] = "dflash"
    small_run: ClassVar[Mapping[str, object]] = {
        "block_size": 4,
        "num_layers": 2,
        "num_anchors": 64,
        "loss": "soft",  # where tokens are few, the target's distribution says more than one token
        "gamma": 2.0,  # a small draft accepts few
    }
    learns_from_guesses: ClassVar[bool] = True
    serving_methods: ClassVar[Mapping[str, str]] = {"vllm": "dflash", "sglang": "DFLASH"}

    @classmethod
    def speculators_fields(cls, fields: Json, folder: Path) -> Json:
        """Return the fields as engines read them. Layers are those entered; full ones look both ways in any case."""
        nested = {name: fields[name] for name in ("mask_token_id", "sample_from_anchor") if name in fields}
        kinds = section(fields, "transformer_layer_config", folder).get("layer_types") or ()
        if SLIDING in kinds and fields.get("sliding_window_non_causal"):
            nested["causal"] = False  # which no sliding layer is here
        same = ("draft_vocab_size", "target_hidden_size", "block_size")
        return {
            "architectures": [ARCHITECTURE],
            **{name: fields[name] for name in same if name in fields},
            "eagle_aux_hidden_state_layer_ids": fields.get("aux_hidden_state_layer_ids"),
            "dflash_config": nested,
        }

    @classmethod
    def check_checkpoint(cls, checkpoint: DraftCheckpoint[DFlashShape]) -> None:
        """Raise ArtifactError for a trained mask vector."""
        if (checkpoint.folder / _MASK_FILE).exists():
            raise ArtifactError(
                f"draft {checkpoint.folder} has a {_MASK_FILE}; only a token's own embedding can be the mask"
            )

    def fresh_shape(self, target: TargetSpec) -> DFlashShape:
        """Return the options, else the paper's defaults and the target's sizes."""
        options, mask_token_id = self.options, self.options.mask_token_id
        kind = FULL if options.sliding_window is None else SLIDING
        return DFlashShape.for_target(
            options,
            target,
            layer_types=options.layer_types or (kind,) * (options.num_layers or 5),
            sliding_window=options.sliding_window,
            block_size=self._block_size,
            mask_token_id=choose_mask_token(target) if mask_token_id is None else mask_token_id,
            layers=options.layers or default_layers(target.num_layers, options.num_features or 5),
            num_target_layers=target.num_layers,
            rope={key: value for key, value in target.rope.items() if key not in _ROPE_NOT_COPIED},
        )

    def target_problem(self, target: TargetSpec) -> str | None:
        """Return what is wrong with the head or the captured layers, or None.

        Engines multiply a DFlash draft's states by the bare rows of the target's head.
        """
        if target.logit_scale != 1:
            return f"its head is scaled ({target.logit_scale}), a head without a scale is needed"
        return self.shape(target).layer_problem(target)

    def embedding_scale(self, target: TargetSpec) -> float:
        """Return the target's own scale, which the exported embedding includes."""
        return target.embedding_scale

    def required_features(self, target: TargetSpec) -> FeatureSchema:
        """Return the captured layers, and the input of the final norm where the loss needs it."""
        layers = self.shape(target).layers
        if self.options.loss == "soft":
            layers = (*layers, target.num_layers)
        return FeatureSchema(layers=layers, hidden_size=target.hidden_size, dtype=target.dtype)

    def denominators(self, supervision: Sequence[Supervision]) -> Tensor:
        """Return float64 [1]: the counted slots' weights, or with ``dpace`` their number."""
        import torch

        from spec_draft_dflash.blocks import BlockRule, slot_weights

        block_size = self._block_size
        weight_S = slot_weights(block_size, self.options.gamma)
        if self.options.loss == "dpace":
            weight_S = torch.ones_like(weight_S)
        rule, reached_S = BlockRule(self.options.num_anchors, block_size), weight_S.cumsum(0)
        shares = [reached_S[rule.draw(sample)[1] - 1].sum() for sample in supervision]
        return sum(shares, torch.zeros((), dtype=torch.float64))[None]

    @classmethod
    def kernels(cls) -> type[DFlashKernels]:
        """Return the kernels that the draft can use (D10)."""
        from spec_draft_dflash.kernels import DFlashKernels

        return DFlashKernels

    def new_module(self, target: TargetSpec, tensors: TargetTensors, kernels: DFlashKernels) -> nn.Module:
        """Return the network with drawn weights."""
        from spec_draft_dflash.model import DFlashModel

        return DFlashModel(self.shape(target), self.options, target.embedding_scale, kernels)

    def initialize(
        self, module: DFlashModel, target: TargetSpec, tensors: TargetTensors, token_counts: Tensor | None
    ) -> None:
        """Start the final norm as the target's, whose head is used as it is."""
        module.load_state_dict({"norm.weight": tensors.norm_H.float()}, strict=False)

    def exported_tensors(
        self, weights: Mapping[str, Tensor], target: TargetSpec
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the module's tensors, and a scaled embedding of the target's.

        Engines share the target's embedding: SGLang the module with its scale, vLLM the bare rows, so for a scaled
        embedding vLLM gets one of its own.
        """
        yield from super().exported_tensors(weights, target)
        if target.embedding_scale != 1:
            yield (
                EMBEDDING,
                as_served(read_target_tensors(target).embedding_VH * target.embedding_scale, target),
            )

    def proposer(self, module: nn.Module, ops: VocabularyOps) -> Proposer:
        """Return a fresh proposer for one sequence (D9)."""
        from spec_draft_dflash.model import DFlashModel
        from spec_draft_dflash.proposer import BlockProposer

        assert isinstance(module, DFlashModel)
        return BlockProposer(module, ops)

    @property
    def max_draft_tokens(self) -> int | None:
        """A block's guesses: one less than its slots (D9)."""
        return self._block_size - 1

    def shard_hints(self, target: TargetSpec) -> ShardHints:
        """Return each decoder layer as a unit of its own, and how tensor-parallel ranks divide it, and ``fc``."""
        shape = self.shape(target)
        layers = tuple(f"layers.{index}" for index in range(shape.num_layers))
        own = TensorParallelHints(
            rows={"fc": shape.num_features * shape.hidden_size},
            whole_inputs=("fc",),
            enters=("hidden_norm",),
            leaves=("fc",),
            each_token=("hidden_norm", "norm"),
            all_tokens_in={layers[0]: shape.block_size},
            all_tokens_out=("norm",),
            partial=tuple(f"{layer}.self_attn.{kind}_norm" for layer in layers for kind in "qk"),
        )
        return ShardHints(blocks=layers, tensor_parallel=sum(map(shape.layer_hints, layers), own))

    @property
    def _block_size(self) -> int:
        return self.options.block_size or 16
