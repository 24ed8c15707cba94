"""This module has the frozen dataclasses that plugin interfaces exchange; it does not import torch.

Shape suffixes: T tokens of a flat batch, N captured layers, H hidden size, S loss positions of a draft.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import metadata
from typing import TYPE_CHECKING, Literal

from spec_core.generation import (
    AcceptanceCounters,
    Generation,
    GenerationRequest,
    SamplingParams,
    ServerCounters,
)
from spec_core.host_tensors import to_device_async
from spec_core.image_source import MOST_IMAGES, ImageSource, PromptWithImages, images_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch
    from torch import Tensor

    from spec_core.context_group import ContextGroup

__all__ = [
    "MOST_IMAGES",
    "AcceptanceCounters",
    "Availability",
    "Capabilities",
    "CaptureRequest",
    "DraftBatch",
    "FeatureSample",
    "FeatureSchema",
    "Generation",
    "GenerationRequest",
    "ImageSource",
    "PromptWithImages",
    "SamplingParams",
    "ServerCounters",
    "ShardHints",
    "Span",
    "StepOutput",
    "Supervision",
    "images_of",
]


@dataclass(frozen=True, kw_only=True)
class Availability:
    """The result of a plugin's ``probe``: whether it can run here, why not, and the versions of its SDK."""

    ok: bool
    reason: str = ""
    versions: Mapping[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def of_distribution(cls, name: str) -> Availability:
        """Return whether the distribution ``name`` is installed, and its version, without importing it."""
        try:
            return cls(ok=True, versions={name: metadata.version(name)})
        except metadata.PackageNotFoundError:
            return cls(ok=False, reason=f"{name} is not installed; pip install {name}")


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """The abilities of a backend on this machine. Callers check a capability, never the backend's name."""

    device_ipc: bool = False
    """Tensors can be shared with another process that uses the same device, without a copy through host
    memory."""
    memory_limit: bool = False
    """``Backend.limit_memory`` enforces the limit."""
    graph_capture: bool = False
    concurrent_collectives: bool = True
    """A process group may be used while another thread of the process uses torch's own groups."""
    dtypes: frozenset[str] = frozenset({"float32"})
    """Torch's names of the dtypes that training may compute in."""
    fp8: bool = False
    """Torch's ``scaled_mm`` works: products in 8-bit floating point, with a scale for each row."""
    num_devices: int = 1
    """Number of devices of this host."""
    device_bytes: int | None = None
    """Memory in bytes of the device with the least memory; None if it is not known."""
    process_bytes: int = 0
    """Bytes of device memory that a process uses and ``limit_memory`` does not count, such as the driver's
    context."""


@dataclass(frozen=True, kw_only=True)
class FeatureSchema:
    """Layers, width and dtype of captured hidden states: one tensor ``[T, N, H]`` per sample.

    ``layers`` are ascending ids k of the residual stream *entering* target layer k (0 = embeddings). The id
    ``num_layers`` of the target means the input of the final norm.
    """

    layers: tuple[int, ...]
    hidden_size: int
    dtype: str
    sent_dtype: Literal["target", "fp8_e4m3"] = "target"
    """How states are sent and stored: in ``dtype``, or in 8-bit floating point (``sent``)."""

    def __post_init__(self) -> None:
        """Raise ValueError if the layers are not unique, ascending and at least 0."""
        if not self.layers or list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 0:
            raise ValueError(f"layers must be unique, ascending and >= 0, got {self.layers}")

    @property
    def sent(self) -> FeatureSchema:
        """The schema of states as they are sent and stored.

        In ``fp8_e4m3`` a row has H + 4 bytes (uint8): its values in e4m3, then its scale, a float32.
        """
        if self.sent_dtype == "target":
            return self
        return FeatureSchema(layers=self.layers, hidden_size=self.hidden_size + 4, dtype="uint8")

    def shape(self, num_tokens: int) -> tuple[int, int, int]:
        """Return the shape [T, N, H] of the hidden states of ``num_tokens`` tokens."""
        return (num_tokens, len(self.layers), self.hidden_size)

    def torch_dtype(self) -> torch.dtype:
        """Return ``dtype`` as a torch.dtype."""
        import torch

        return getattr(torch, self.dtype)

    def bytes_per_token(self) -> int:
        """Return the number of bytes of one token's hidden states, without the 8 bytes of the token's id.

        The number of bits is read from the dtype's name (bfloat16, float8_e4m3fn), so that torch is not
        imported.
        """
        bits = re.search(r"\d+", self.dtype)
        if bits is None:
            raise ValueError(f"dtype {self.dtype!r} does not say its bits")
        return len(self.layers) * self.hidden_size * (int(bits[0]) // 8)


@dataclass(frozen=True, kw_only=True)
class CaptureRequest:
    """A request to run one sample through the target and to send its features to ``destinations``."""

    request_id: int
    input_ids: tuple[int, ...]
    destinations: tuple[str, ...]
    """``FeatureReceiver.address`` of each trainer process that trains on this sample: one process, or all
    processes of a tensor-parallel group. Empty if the sample has arrived before and its batch is captured
    again for another sample."""
    images: tuple[ImageSource, ...] = ()
    """Images of the sample, in the order of their tokens. ``input_ids`` have ``TargetSpec.image_token_id`` once for
    each embedding of an image. Empty for an engine without the ability ``images``."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FeatureSample:
    """Token ids and hidden states of one sample, which equals no other. The trainer itself has the loss mask."""

    request_id: int
    input_ids: Tensor
    """int64 [T]: the token ids that the engine ran. The trainer compares them with its request."""
    hidden_TNH: Tensor
    """Hidden states [T, N, H] in the dtype and layer order of the schema, as it is ``FeatureSchema.sent``."""

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the hidden states and token ids."""
        return self.input_ids.nbytes + self.hidden_TNH.nbytes


@dataclass(frozen=True, kw_only=True)
class Supervision:
    """The data of a sample from which its loss denominators are computed, before any forward pass."""

    sample_id: int
    epoch: int
    loss_mask: Tensor
    """bool [T]: element i is True if token i is supervised."""
    guess_depth: Tensor | None = None
    """int64 [T]: ``Generation.guess_depths`` of a sample that an engine has decoded, 0 for prompt tokens."""
    seed: int = 0
    """``DraftBatch.seed`` of the batches that contain this sample."""
    evaluates: bool = False
    """``DraftBatch.evaluates`` of the batches that contain this sample."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """One document inside a flat batch: tokens ``start`` to ``stop`` (exclusive)."""

    sample_id: int
    epoch: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class DraftBatch:
    """A micro-batch: documents laid out along one token axis, with or without padding between them.

    In a packed batch there is no padding between documents; otherwise each document is padded to the longest.
    Tokens outside every span are padding: id 0, zero features, not supervised. A batch may have no spans and
    then gives loss 0: a rank without samples takes part in the step with such a batch.
    """

    input_ids_T: Tensor
    """Token ids, int64 [T]."""
    hidden_TNH: Tensor
    """Captured hidden states [T, N, H]."""
    loss_mask_T: Tensor
    """bool [T], always on the CPU: supervised rows are selected there, which avoids a device
    synchronization."""
    spans: tuple[Span, ...]
    guess_depth_T: Tensor | None = None
    """``Supervision.guess_depth`` of all tokens, int64 [T] on the CPU; None if no sample has one."""
    seed: int = 0
    """Seed of the run; a draft's random draws are a function of (seed, epoch, sample id)."""
    evaluates: bool = False
    """Whether the batch is evaluated and not trained. Then it has no guess depths, and a draft leaves out no part of
    a sample at random."""
    rows_multiple: int = 1
    """T is a multiple of this number. If a draft computes only some of the T rows, their number must be a multiple,
    too."""
    context: ContextGroup | None = None
    """The processes that divide the batch's tokens; only for a draft whose hints say ``context_parallel``."""

    def supervision(self, span: Span) -> Supervision:
        """Return the data of one document of the batch from which its loss denominators are computed."""
        tokens = slice(span.start, span.stop)
        guess_depth_T = self.guess_depth_T
        return Supervision(
            sample_id=span.sample_id,
            epoch=span.epoch,
            loss_mask=self.loss_mask_T[tokens],
            guess_depth=None if guess_depth_T is None else guess_depth_T[tokens],
            seed=self.seed,
            evaluates=self.evaluates,
        )

    def to(self, device: torch.device) -> DraftBatch:
        """Return the batch with token ids and hidden states on ``device``.

        Copies from pinned memory are asynchronous.
        """
        return replace(
            self,
            input_ids_T=self.input_ids_T.to(device, non_blocking=True),
            hidden_TNH=self.hidden_TNH.to(device, non_blocking=True),
        )

    def pinned(self) -> DraftBatch:
        """Return a copy of the batch in pinned memory, from which copies to a device are asynchronous."""
        return replace(
            self,
            input_ids_T=self.input_ids_T.pin_memory(),
            hidden_TNH=self.hidden_TNH.pin_memory(),
        )

    @cached_property
    def position_T(self) -> Tensor:
        """int64 [T]: for each token, its position within its document; 0 in padding."""
        return to_device_async(self.host_position_T.clamp(min=0), self.input_ids_T.device)

    @cached_property
    def host_position_T(self) -> Tensor:
        """int64 [T], on the CPU: like ``position_T``, but −1 in padding."""
        import torch

        # A loop over the documents would be a few operations for each of them.
        length_D = torch.tensor([span.stop - span.start for span in self.spans], dtype=torch.int64)
        start_D = torch.tensor([span.start for span in self.spans], dtype=torch.int64)
        ends_D = length_D.cumsum(0)
        position_X = torch.arange(int(length_D.sum())) - (ends_D - length_D).repeat_interleave(length_D)
        position_T = torch.full((len(self.loss_mask_T),), -1)
        position_T[start_D.repeat_interleave(length_D) + position_X] = position_X
        return position_T


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """The loss and metrics of one forward pass of a draft, or their sums over one step.

    ``loss`` is this batch's share of the global loss: numerators over *global* denominators, so shares add
    up over micro-batches and ranks. Every metric is ``sums[name] / counts[name]``, element by element; both
    add up the same way.
    """

    loss: Tensor
    sums: Mapping[str, Tensor]
    counts: Mapping[str, Tensor]

    def __add__(self, other: StepOutput) -> StepOutput:
        """Return the element-wise sum of two outputs."""
        return StepOutput(
            loss=self.loss + other.loss,
            sums={name: value + other.sums[name] for name, value in self.sums.items()},
            counts={name: value + other.counts[name] for name, value in self.counts.items()},
        )

    def combined(self, combine: Callable[[Tensor], Tensor]) -> StepOutput:
        """Apply ``combine`` to one float64 vector of all values, and return an output of the resulting values.

        One collective thus reduces the loss and all metrics.
        """
        import torch

        own = [self.loss, *self.sums.values(), *self.counts.values()]
        flat = combine(torch.cat([value.reshape(-1).double() for value in own]))
        pieces = flat.split([value.numel() for value in own])
        loss, *others = [piece.view(value.shape) for piece, value in zip(pieces, own, strict=True)]
        return StepOutput(
            loss=loss,
            sums=dict(zip(self.sums, others, strict=False)),
            counts=dict(zip(self.counts, others[len(self.sums) :], strict=True)),
        )

    def detached(self) -> StepOutput:
        """Return the output with the loss detached from its autograd graph."""
        return StepOutput(loss=self.loss.detach(), sums=self.sums, counts=self.counts)

    def metrics(self) -> dict[str, float | list[float]]:
        """Return metric name -> value or list of values, as Python numbers; a count of 0 gives 0.0."""
        return {
            name: (total.double() / self.counts[name].double().clamp(min=1)).tolist()
            for name, total in self.sums.items()
        }


@dataclass(frozen=True, kw_only=True)
class ShardHints:
    """Hints for sharding a draft's module in training.

    A strategy ignores the kinds of hints that it does not know.

    Submodules have the names that ``module.get_submodule`` takes. A draft without hints is trained, too: its
    parameters are then gathered all at once, and every rank of a tensor-parallel group computes the same.
    """

    blocks: tuple[str, ...] = ()
    """Submodules, innermost first, that FSDP wraps: the parameters of each are gathered and freed together.
    The parameters of a submodule may be used in its own ``forward`` only."""
    tensor_parallel: object | None = None
    """How tensor-parallel ranks divide the module, in the terms of a library that draft and strategy share, such as
    ``spec_kit.sharding.TensorParallelHints``; None if they do not divide it."""
    undivided: str = ""
    """Which part cannot be divided over tensor-parallel ranks, for the error message of a strategy that is asked
    to. If it is empty, every rank of a tensor-parallel group computes the same."""
    vocabulary: tuple[str, ...] = ()
    """Submodules whose weight has a row for each token of the vocabulary, such as a head. Some optimizers,
    such as Muon, treat other matrices differently (``TrainedWeight.is_hidden_matrix``)."""

    context_parallel: bool = False
    """Whether the module computes only this process's share of a batch that has a ``DraftBatch.context``."""

    def is_vocabulary(self, weight: str) -> bool:
        """Return whether the parameter named ``weight`` belongs to a submodule listed in ``vocabulary``."""
        return weight.rpartition(".")[0] in self.vocabulary
