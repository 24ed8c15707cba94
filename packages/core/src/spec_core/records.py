"""Values that cross an interface. Frozen, importable without torch; only batches and samples hold tensors.

Shape suffixes: T tokens of a flat batch, N captured layers, H hidden size, S loss positions of a draft.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import metadata
from typing import TYPE_CHECKING

from spec_core.generation import AcceptanceCounters, Generation, SamplingParams, ServerCounters
from spec_core.host_tensors import to_device_async

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch
    from torch import Tensor

__all__ = [
    "AcceptanceCounters",
    "Availability",
    "Capabilities",
    "CaptureRequest",
    "DraftBatch",
    "FeatureSample",
    "FeatureSchema",
    "Generation",
    "SamplingParams",
    "ServerCounters",
    "ShardHints",
    "Span",
    "StepOutput",
    "Supervision",
    "TensorParallelHints",
]


@dataclass(frozen=True, kw_only=True)
class Availability:
    """The result of a plugin's ``probe``: whether it can run here, why not, and the versions of its SDK."""

    ok: bool
    reason: str = ""
    versions: Mapping[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def of_distribution(cls, name: str) -> Availability:
        """Return whether the distribution ``name`` is installed, and in which version; it is not imported."""
        try:
            return cls(ok=True, versions={name: metadata.version(name)})
        except metadata.PackageNotFoundError:
            return cls(ok=False, reason=f"{name} is not installed; pip install {name}")


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """The abilities of a backend on this machine. Callers ask for a capability, never for a backend's name."""

    device_ipc: bool = False
    """Tensors can be handed to another process of the same device without a host copy."""
    memory_limit: bool = False
    """``limit_memory`` is enforced."""
    graph_capture: bool = False
    concurrent_collectives: bool = True
    """A process group may be used while another thread of the process uses torch's own groups."""
    dtypes: frozenset[str] = frozenset({"float32"})
    """Training dtypes, by torch name."""
    num_devices: int = 1
    """Devices of this host."""
    device_bytes: int | None = None
    """Memory of the smallest device in bytes; None where it is not known."""
    process_bytes: int = 0
    """Bytes that a process takes of a device beside what ``limit_memory`` counts, such as the driver's context."""


@dataclass(frozen=True, kw_only=True)
class FeatureSchema:
    """Layout of what the engine captures: one tensor ``[T, N, H]`` per sample.

    ``layers`` are ascending ids k of the residual stream *entering* target layer k (0 = embeddings);
    ``num_layers`` of the target is a legal id and means the input of the final norm.
    """

    layers: tuple[int, ...]
    hidden_size: int
    dtype: str

    def __post_init__(self) -> None:
        """Raise ValueError where the layers are not unique, ascending and at least 0."""
        if not self.layers or list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 0:
            raise ValueError(f"layers must be unique, ascending and >= 0, got {self.layers}")

    def shape(self, num_tokens: int) -> tuple[int, int, int]:
        """Return the shape of the hidden states of so many tokens."""
        return (num_tokens, len(self.layers), self.hidden_size)

    def torch_dtype(self) -> torch.dtype:
        """Return ``dtype`` as torch has it."""
        import torch

        return getattr(torch, self.dtype)

    def bytes_per_token(self) -> int:
        """Return the bytes of the hidden states of one token, without the 8 bytes of its id.

        The bits come from the dtype's name, as in bfloat16 or float8_e4m3fn, so that a launcher needs no torch.
        """
        bits = re.search(r"\d+", self.dtype)
        if bits is None:
            raise ValueError(f"dtype {self.dtype!r} does not say its bits")
        return len(self.layers) * self.hidden_size * (int(bits[0]) // 8)


@dataclass(frozen=True, kw_only=True)
class CaptureRequest:
    """A sample for an engine to run through the target, and the receiver of its features."""

    request_id: int
    input_ids: tuple[int, ...]
    destinations: tuple[str, ...]
    """``FeatureReceiver.address`` of each trainer process that trains this sample: one, or all of a tensor-parallel
    group. None for a sample that has arrived, when its batch is captured again for another one."""


@dataclass(frozen=True, kw_only=True)
class FeatureSample:
    """The features of one sample. The trainer adds the loss mask by ``sample_id``."""

    request_id: int
    input_ids: Tensor
    """int64 [T], echoed by the engine and compared with the request."""
    hidden_TNH: Tensor
    """[T, N, H] in the schema's dtype and layer order."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the hidden states and token ids."""
        return self.input_ids.nbytes + self.hidden_TNH.nbytes


@dataclass(frozen=True, kw_only=True)
class Supervision:
    """The part of a sample that its loss denominators depend on; known before any forward pass."""

    sample_id: int
    epoch: int
    loss_mask: Tensor
    """bool [T]: token i is supervised."""
    guess_place: Tensor | None = None
    """int64 [T]: ``Generation.guess_places`` of a sample that an engine has decoded, 0 in its prompt."""
    seed: int = 0
    """``DraftBatch.seed`` of the batches that hold this sample."""


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

    Packed, the documents touch; unpacked, each is padded to the longest. Tokens outside every span are
    padding: id 0, zero features, not supervised. A batch without spans is legal (a rank that has run out
    of samples takes part in the step with it) and gives loss 0.
    """

    input_ids_T: Tensor
    """int64 [T]"""
    hidden_TNH: Tensor
    """[T, N, H], as captured."""
    loss_mask_T: Tensor
    """bool [T], always on the CPU: supervised rows are selected there to avoid a wait for the device."""
    spans: tuple[Span, ...]
    guess_place_T: Tensor | None = None
    """int64 [T], on the CPU: ``Supervision.guess_place``; None where no sample has one."""
    seed: int = 0
    """Seed of the run; a draft's random draws are a function of (seed, epoch, sample id)."""
    rows_multiple: int = 1
    """A draft that leaves out rows of the batch keeps a multiple of this number; T is one."""

    def to(self, device: torch.device) -> DraftBatch:
        """Return the batch on ``device``, except the mask; a copy from pinned memory is asynchronous."""
        return replace(
            self,
            input_ids_T=self.input_ids_T.to(device, non_blocking=True),
            hidden_TNH=self.hidden_TNH.to(device, non_blocking=True),
        )

    def pinned(self) -> DraftBatch:
        """Return the batch in pinned memory, from which copies to a device are asynchronous."""
        return replace(
            self,
            input_ids_T=self.input_ids_T.pin_memory(),
            hidden_TNH=self.hidden_TNH.pin_memory(),
        )

    @cached_property
    def end_T(self) -> Tensor:
        """int64 [T]: one past the last token of the document that owns each token; 0 in padding."""
        return self._per_token([span.stop for span in self.spans])

    @cached_property
    def position_T(self) -> Tensor:
        """int64 [T]: position of each token within its document; 0 in padding."""
        import torch

        index_T = torch.arange(len(self.input_ids_T), device=self.input_ids_T.device)
        start_T = self._per_token([span.start for span in self.spans])
        return torch.where(self.end_T > 0, index_T - start_T, 0)

    def _per_token(self, per_span: list[int]) -> Tensor:
        """Repeat one number per document for its tokens; built on the CPU to avoid a wait for the device."""
        import torch

        out_T = torch.zeros(len(self.input_ids_T), dtype=torch.int64)
        for span, value in zip(self.spans, per_span, strict=True):
            out_T[span.start : span.stop] = value
        return to_device_async(out_T, self.input_ids_T.device)


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """The result of one forward pass of a draft or, summed, of one step.

    ``loss`` is this batch's share of the global loss: numerators over *global* denominators, so shares add
    up over micro-batches and ranks. Every metric is ``sums[name] / counts[name]``, element by element; both
    add up the same way.
    """

    loss: Tensor
    sums: Mapping[str, Tensor]
    counts: Mapping[str, Tensor]

    def __add__(self, other: StepOutput) -> StepOutput:
        """Return the sum of two outputs."""
        return StepOutput(
            loss=self.loss + other.loss,
            sums={name: value + other.sums[name] for name, value in self.sums.items()},
            counts={name: value + other.counts[name] for name, value in self.counts.items()},
        )

    def combined(self, combine: Callable[[Tensor], Tensor]) -> StepOutput:
        """Return the output with ``combine`` applied to all its values, as one float64 vector.

        So one collective does for everything.
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
        """Return the output with a loss that holds no graph."""
        return StepOutput(loss=self.loss.detach(), sums=self.sums, counts=self.counts)

    def metrics(self) -> dict[str, float | list[float]]:
        """Return every metric as Python numbers; a count of 0 gives 0.0."""
        return {
            name: (total.double() / self.counts[name].double().clamp(min=1)).tolist()
            for name, total in self.sums.items()
        }


@dataclass(frozen=True, kw_only=True)
class TensorParallelHints:
    """How tensor-parallel ranks divide a draft's module: each runs the module's code on its parts of some weights.

    A draft that gives these hints takes its sizes from its weights, and leaves the vocabulary to ``VocabularyOps``.
    The number next to a layer says how many equal pieces it has, such as heads or channels; none is ever divided.
    """

    columns: Mapping[str, int] = field(default_factory=dict[str, int])
    """Linear layers whose outputs are divided, and with them the rows of the weight, and the bias."""
    replicated: tuple[str, ...] = ()
    """Those of ``columns`` whose pieces several ranks may have, such as key-value heads. Where these are fewer than
    ranks, neighbours have the same one, and what they know of its gradient is summed."""
    rows: Mapping[str, int] = field(default_factory=dict[str, int])
    """Linear layers without a bias whose inputs are divided, and with them the columns of the weight."""
    whole_inputs: tuple[str, ...] = ()
    """Those of ``rows`` that get the whole input: a rank's part is cut out of it."""
    enters: tuple[str, ...] = ()
    """Modules whose output goes into divided layers only: the parts of its gradient are summed over ranks."""
    leaves: tuple[str, ...] = ()
    """Modules whose output is a rank's part of a sum, such as those of ``rows``: it is summed over ranks."""
    partial: tuple[str, ...] = ()
    """Modules with whole weights that work on a rank's part, such as a norm of each head: the gradients of their
    weights are summed over ranks."""
    each_token: tuple[str, ...] = ()
    """Modules with whole weights, between those that leave and those that enter, that work on each token by itself,
    such as norms: with sequence parallel a rank has a part of their tokens, which are the last dimension but one, and
    the gradients of their weights are summed over ranks. Empty: the draft is not for sequence parallel."""
    all_tokens_in: Mapping[str, int] = field(default_factory=dict[str, int])
    """Modules whose first input has all tokens even so: a rank's part is cut out of it. The number next to each says
    how many tokens its dimension has; 0: those of the batch, or some of them, a multiple of ``rows_multiple``."""
    all_tokens_out: tuple[str, ...] = ()
    """Modules whose output goes, for all tokens, into code that every rank runs alike, such as the loss: it is
    gathered."""
    kept_ids: str = ""
    """Buffer, bool [V]: which ids of the target's vocabulary have a row in the draft's head, rows ascending by id.
    The vocabulary is cut where it gives each rank equally many of them. Without it, into equal parts."""

    def __add__(self, other: TensorParallelHints) -> TensorParallelHints:
        """Return the hints of both."""
        return TensorParallelHints(
            columns={**self.columns, **other.columns},
            replicated=self.replicated + other.replicated,
            rows={**self.rows, **other.rows},
            whole_inputs=self.whole_inputs + other.whole_inputs,
            enters=self.enters + other.enters,
            leaves=self.leaves + other.leaves,
            partial=self.partial + other.partial,
            each_token=self.each_token + other.each_token,
            all_tokens_in={**self.all_tokens_in, **other.all_tokens_in},
            all_tokens_out=self.all_tokens_out + other.all_tokens_out,
            kept_ids=self.kept_ids or other.kept_ids,
        )


@dataclass(frozen=True, kw_only=True)
class ShardHints:
    """Hints for training a draft's module in parts. A strategy follows those that it knows and ignores the others.

    A draft names submodules as ``module.get_submodule`` takes them. A draft without hints is trained, too: its
    parameters are then gathered all at once, and every rank of a tensor-parallel group computes the same. Further
    kinds of hints are further fields with an empty default: older drafts stay valid.
    """

    blocks: tuple[str, ...] = ()
    """Submodules whose parameters are gathered and freed together, innermost first: FSDP wraps each by itself. Each
    must use its own parameters in its own forward only."""
    tensor_parallel: TensorParallelHints | None = None
    """How tensor-parallel ranks divide the module; None: not at all."""
    vocabulary: tuple[str, ...] = ()
    """Submodules whose weight has a row for each token, such as a head: no matrices between hidden states, for which
    some optimizers are made (``TrainedWeight.is_hidden_matrix``)."""

    def is_vocabulary(self, weight: str) -> bool:
        """Return whether a weight, named as in the module, belongs to a submodule of ``vocabulary``."""
        return weight.rpartition(".")[0] in self.vocabulary
