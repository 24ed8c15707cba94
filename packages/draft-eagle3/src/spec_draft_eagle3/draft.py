"""Eagle3Draft: the plugin. Imports without torch; the network is in ``model.py``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Self

from spec_core.draft import Draft, Proposer
from spec_core.drafting.served_draft import head_problem, published
from spec_core.errors import ConfigError, TargetError
from spec_core.kernels import no_kernel
from spec_core.records import FeatureSchema
from spec_draft_eagle3.artifact import Artifact
from spec_draft_eagle3.config import Eagle3Config
from spec_draft_eagle3.shape import FIXED_OPTIONS, DraftShape

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor, nn

    from spec_core.config import DraftConfig
    from spec_core.kernels import FindKernel
    from spec_core.ops import VocabularyOps
    from spec_core.records import Supervision
    from spec_core.target import TargetSpec, TargetTensors
    from spec_draft_eagle3.kernels import Eagle3Kernels


class Eagle3Draft(Draft):
    """EAGLE-3 (arXiv 2503.01840) with training-time test; see ``spec_core.draft`` for the contract."""

    name: ClassVar[str] = "eagle3"
    api_version: ClassVar[int] = 2
    Config: ClassVar[type[DraftConfig]] = Eagle3Config
    small_run: ClassVar[Mapping[str, object]] = {"num_steps": 4}
    serving_methods: ClassVar[Mapping[str, str]] = {"vllm": "eagle3", "sglang": "EAGLE3"}

    def __init__(self, config: DraftConfig) -> None:
        """Opens ``init_from``: a wrong folder (ArtifactError) or option (ConfigError) fails before a start."""
        assert isinstance(config, Eagle3Config)
        self._options, self._artifact = published(config, Artifact.open, FIXED_OPTIONS, "an Eagle3")
        super().__init__(self._options)

    @classmethod
    def from_folder(cls, folder: Path) -> Self | None:
        if Artifact.open(folder) is None:
            return None
        return cls(Eagle3Config(name=cls.name, init_from=folder))

    def check_target(self, target: TargetSpec) -> None:
        shape = self._shape(target)
        problems = (
            head_problem(target),
            _size_problem(shape, target),
            _layer_problem(shape, target, self._options.layers),
            shape.problem(),
        )
        if problem := next((text for text in problems if text), None):
            raise TargetError(
                f"{self._who} does not go with target {target.folder} ({target.architecture}): {problem}"
            )
        if len(target.eos_token_ids) > shape.vocab_size:
            raise ConfigError(
                f"draft.vocab_size={shape.vocab_size} does not hold the target's {len(target.eos_token_ids)} "
                "end tokens; raise it"
            )
        if self._artifact is not None:
            self._artifact.check_embedding(target)

    def required_features(self, target: TargetSpec) -> FeatureSchema:
        layers = (*self._shape(target).layer_ids(target.num_layers), target.num_layers)
        return FeatureSchema(layers=layers, hidden_size=target.hidden_size, dtype=target.dtype)

    def denominators(self, supervision: Sequence[Supervision]) -> Tensor:
        """float64 [S]: supervised tokens with at least s + 2 tokens before them in their document."""
        import torch

        steps = self._options.num_steps
        counts = [
            torch.stack([sample.loss_mask[s + 2 :].sum() for s in range(steps)]) for sample in supervision
        ]
        return sum(counts, torch.zeros(steps, dtype=torch.int64)).to("cpu", torch.float64)

    @classmethod
    def kernels(cls) -> type[Eagle3Kernels]:
        from spec_draft_eagle3.kernels import Eagle3Kernels

        return Eagle3Kernels

    def build(
        self,
        target: TargetSpec,
        tensors: TargetTensors,
        token_counts: Tensor | None,
        kernel: FindKernel = no_kernel,
    ) -> nn.Module:
        from spec_draft_eagle3.initial_weights import initialize
        from spec_draft_eagle3.model import Eagle3Model

        self.check_target(target)
        module = Eagle3Model(self._shape(target), self._options, self.kernels().of(kernel))
        if self._artifact is not None:
            module.load_state_dict(self._artifact.read())
        else:
            initialize(module, target, tensors, token_counts)
        return module

    def exported_config(self, target: TargetSpec) -> dict[str, Any]:
        from spec_draft_eagle3.export import served_config

        return served_config(self._shape(target), target)

    def exported_tensors(
        self, weights: Mapping[str, Tensor], target: TargetSpec
    ) -> Iterator[tuple[str, Tensor]]:
        from spec_draft_eagle3.export import served_tensors

        return served_tensors(weights, self._shape(target), target)

    def proposer(self, module: nn.Module, ops: VocabularyOps) -> Proposer:
        from spec_draft_eagle3.model import Eagle3Model
        from spec_draft_eagle3.proposer import ChainProposer

        assert isinstance(module, Eagle3Model)
        return ChainProposer(module, ops)

    @property
    def _who(self) -> str:
        return "the eagle3 draft" if self._artifact is None else f"draft {self._artifact.folder}"

    def _shape(self, target: TargetSpec) -> DraftShape:
        if self._artifact is None:
            return DraftShape.for_target(self._options, target)
        return self._artifact.shape


def _size_problem(shape: DraftShape, target: TargetSpec) -> str | None:
    """Of a published draft, whose sizes are its own."""
    for what, made_for, found in (
        ("hidden size", shape.hidden_size, target.hidden_size),
        ("vocabulary size", shape.target_vocab_size, target.vocab_size),
    ):
        if made_for != found:
            return f"it was made for {what} {made_for}, this target has {found}"
    return None


def _layer_problem(shape: DraftShape, target: TargetSpec, wanted: tuple[int, ...] | None) -> str | None:
    """Ids run from 1 to N − 1: engines count some lists from the layer before, and cannot all tap the last one."""
    if shape.layers is None and target.num_layers < 7:
        return f"it has {target.num_layers} layers, at least 7 are needed unless draft.layers names others"
    layers = shape.layer_ids(target.num_layers)
    if layers[0] < 1 or layers[-1] >= target.num_layers:
        return f"layers {list(layers)} must lie between 1 and {target.num_layers - 1}"
    if wanted not in (None, layers):
        return f"draft.layers={list(wanted)} contradicts draft.init_from, whose layers are {list(layers)}"
    return None
