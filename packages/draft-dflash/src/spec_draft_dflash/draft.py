"""DFlashDraft: the plugin. Imports without torch; the network is in ``model.py``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Self

from spec_core.draft import Draft, Proposer
from spec_core.drafting.served_draft import head_problem, published
from spec_core.errors import TargetError
from spec_core.kernels import no_kernel
from spec_core.records import FeatureSchema, ShardHints
from spec_draft_dflash.artifact import Artifact
from spec_draft_dflash.config import DFlashConfig
from spec_draft_dflash.shape import FIXED_OPTIONS, DraftShape

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor, nn

    from spec_core.config import DraftConfig
    from spec_core.kernels import FindKernel
    from spec_core.ops import VocabularyOps
    from spec_core.records import Supervision
    from spec_core.target import TargetSpec, TargetTensors
    from spec_draft_dflash.kernels import DFlashKernels


class DFlashDraft(Draft):
    """DFlash (arXiv 2602.06036): a block of tokens in one pass; see ``spec_core.draft`` for the contract."""

    name: ClassVar[str] = "dflash"
    api_version: ClassVar[int] = 2
    Config: ClassVar[type[DraftConfig]] = DFlashConfig
    small_run: ClassVar[Mapping[str, object]] = {
        "block_size": 8,
        "num_layers": 2,
        "num_anchors": 32,
        "loss": "soft",  # the law says more than one token, where tokens are few
        "gamma": 2.0,  # a small draft accepts few
    }
    serving_methods: ClassVar[Mapping[str, str]] = {"vllm": "dflash", "sglang": "DFLASH"}

    def __init__(self, config: DraftConfig) -> None:
        """Opens ``init_from``: a wrong folder (ArtifactError) or option (ConfigError) fails before a start."""
        assert isinstance(config, DFlashConfig)
        self._options, self._artifact = published(config, Artifact.open, FIXED_OPTIONS, "a DFlash")
        super().__init__(self._options)

    @classmethod
    def from_folder(cls, folder: Path) -> Self | None:
        if Artifact.open(folder) is None:
            return None
        return cls(DFlashConfig(name=cls.name, init_from=folder))

    def check_target(self, target: TargetSpec) -> None:
        shape = self._shape(target)
        problems = (
            head_problem(target),
            _scale_problem(target),
            _size_problem(shape, target),
            _layer_problem(shape, target),
            shape.problem(),
        )
        if problem := next((text for text in problems if text), None):
            raise TargetError(
                f"{self._who} does not go with target {target.folder} ({target.architecture}): {problem}"
            )
        if self._artifact is not None:
            self._artifact.check_embedding(target)

    def required_features(self, target: TargetSpec) -> FeatureSchema:
        layers = self._shape(target).layers
        if self._options.loss == "soft":
            layers = (*layers, target.num_layers)
        return FeatureSchema(layers=layers, hidden_size=target.hidden_size, dtype=target.dtype)

    def denominators(self, supervision: Sequence[Supervision]) -> Tensor:
        """float64 [1]: the counted slots' weights, or with ``dpace`` their number."""
        import torch

        from spec_draft_dflash.blocks import BlockRule, slot_weights

        block_size = self._block_size
        weight_S = slot_weights(block_size, self._options.gamma)
        if self._options.loss == "dpace":
            weight_S = torch.ones_like(weight_S)
        rule, reached_S = BlockRule(self._options.num_anchors, block_size), weight_S.cumsum(0)
        shares = [reached_S[rule.draw(sample)[1] - 1].sum() for sample in supervision]
        return sum(shares, torch.zeros((), dtype=torch.float64))[None]

    @classmethod
    def kernels(cls) -> type[DFlashKernels]:
        from spec_draft_dflash.kernels import DFlashKernels

        return DFlashKernels

    def build(
        self,
        target: TargetSpec,
        tensors: TargetTensors,
        token_counts: Tensor | None,
        kernel: FindKernel = no_kernel,
    ) -> nn.Module:
        """The final norm starts as the target's: its head is used as it is."""
        from spec_draft_dflash.model import DFlashModel

        self.check_target(target)
        kernels = self.kernels().of(kernel)
        module = DFlashModel(self._shape(target), self._options, target.embedding_scale, kernels)
        if self._artifact is not None:
            module.load_state_dict(self._artifact.read())
        else:
            module.load_state_dict({"norm.weight": tensors.norm_H.float()}, strict=False)
        return module

    def exported_config(self, target: TargetSpec) -> dict[str, Any]:
        from spec_draft_dflash.export import served_config

        return served_config(self._shape(target), target)

    def exported_tensors(
        self, weights: Mapping[str, Tensor], target: TargetSpec
    ) -> Iterator[tuple[str, Tensor]]:
        from spec_draft_dflash.export import served_tensors

        return served_tensors(weights, self._shape(target), target)

    def proposer(self, module: nn.Module, ops: VocabularyOps) -> Proposer:
        from spec_draft_dflash.model import DFlashModel
        from spec_draft_dflash.proposer import BlockProposer

        assert isinstance(module, DFlashModel)
        return BlockProposer(module, ops)

    @property
    def max_draft_tokens(self) -> int | None:
        return self._block_size - 1

    def shard_hints(self) -> ShardHints:
        options = self._options
        fresh = len(options.layer_types or ()) or options.num_layers or 5
        num_layers = fresh if self._artifact is None else self._artifact.shape.num_layers
        return ShardHints(blocks=tuple(f"layers.{index}" for index in range(num_layers)))

    @property
    def _who(self) -> str:
        return "the dflash draft" if self._artifact is None else f"draft {self._artifact.folder}"

    @property
    def _block_size(self) -> int:
        return self._artifact.shape.block_size if self._artifact else self._options.block_size or 16

    def _shape(self, target: TargetSpec) -> DraftShape:
        return self._artifact.shape if self._artifact else DraftShape.for_target(self._options, target)


def _scale_problem(target: TargetSpec) -> str | None:
    """Engines multiply a DFlash draft's states by the bare rows of the target's head."""
    scaled = f"its head is scaled ({target.logit_scale}), a head without a scale is needed"
    return None if target.logit_scale == 1 else scaled


def _size_problem(shape: DraftShape, target: TargetSpec) -> str | None:
    """Of a published draft, whose sizes are its own."""
    for what, made_for, found in (
        ("hidden size", shape.hidden_size, target.hidden_size),
        ("vocabulary size", shape.vocab_size, target.vocab_size),
        ("number of layers", shape.num_target_layers or target.num_layers, target.num_layers),
    ):
        if made_for != found:
            return f"it was made for {what} {made_for}, this target has {found}"
    return None


def _layer_problem(shape: DraftShape, target: TargetSpec) -> str | None:
    """Ids run from 1 to N − 1: SGLang cannot tap the last layer's output."""
    layers = shape.layers
    if list(layers) != sorted(set(layers)):
        return (
            f"its {target.num_layers} layers are too few for {len(layers)} different features (8 layers for 5); "
            "lower draft.num_features or set draft.layers"
        )
    if layers[0] < 1 or layers[-1] >= target.num_layers:
        return f"layers {list(layers)} must lie between 1 and {target.num_layers - 1}"
    return None
