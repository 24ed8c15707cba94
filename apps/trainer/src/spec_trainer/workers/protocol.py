"""Messages between the controller of a run and its workers, the same for every launcher.

::

    worker                      controller
      ◄──────────────────── order     what the worker is
      ◄──────────────────── Begin     to a worker that waits for others of its device
    DatasetWanted ────────────►       from a worker whose host does not see the run directory; answered by DatasetPart
    RendezvousAddress ────────►       from trainer rank 0: address of the rendezvous; passed on to the other ranks
    Ready ────────────────────►
      ◄──────────────────── Start     to trainer ranks, once every worker is ready
      ◄──────────────────── Capture   to engines, also to an engine that replaces another; answered by Captured
    Released ─────────────────►       from trainer ranks: transport memory of samples is free
    StepDone ─────────────────►       from trainer ranks; answered by Proceed
    StepShown ────────────────►       from trainer rank 0: the record of a step, for the progress display
    Trained ──────────────────►       from trainer ranks whose host does not see the run directory: samples of a step
    Finished ─────────────────►       from trainer ranks: the work is done, or was stopped on request
      ◄──────────────────── Stop      to everyone, once every rank has finished
    Failed ───────────────────►       from anyone, at any time

A run that measures its draft (``train.serve_every``)::

    Exported ─────────────────►       from trainer rank 0; decoders get Serve and Generate as below
      ◄──────────────────── Measured  to trainer rank 0

A run that decodes goes through cycles. For each one::

      ◄──────────────────── Serve       to decoders; answered by Served
      ◄──────────────────── Generate    to decoders; answered by Generated
      ◄──────────────────── TrainCycle  to engines and ranks; a rank answers Ready; then as above from Start on

A run that follows live requests goes through tasks. For each one::

      ◄──────────────────── Perform     to engines and the rank, which answers Ready; then as above until Finished
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ControlMessage:
    """Base of all messages; every field must be JSON-serializable."""

    def to_json(self) -> dict[str, Any]:
        """Return the message as a JSON-serializable dict, which shares the fields' values."""
        return {"kind": type(self).__name__, **vars(self)}


def from_json(fields: dict[str, Any]) -> ControlMessage:
    """Return the message from the dict that ``to_json`` returned."""
    values = fields.copy()
    return _types()[values.pop("kind")](**values)


@functools.cache
def _types() -> dict[str, type[ControlMessage]]:
    """Return class name -> class of each message type."""
    return {message.__name__: message for message in ControlMessage.__subclasses__()}


@dataclass(frozen=True, kw_only=True)
class WorkerOrder:
    """Description of a worker and its task, which a launcher passes on as ``WorkerSpec.arguments``."""

    name: str
    program: str
    """Function to run, ``package.module:name``; its arguments are an ExitStack, a ControllerLink and this order."""
    index: int
    """Index of the engine replica or decoder, or the trainer rank."""
    memory_fraction: float | None
    """Share of each device's memory that the worker may take; None for no limit."""
    init_order: int
    """A worker uses no device before all workers with a lower number are ready; above 0 it waits for Begin."""
    config: dict[str, Any]
    """The resolved configuration of the run."""
    token: str
    """Secret by which the ranks of a run authenticate to each other."""
    dataset: str
    """Folder of the tokenised dataset."""


@dataclass(frozen=True)
class Begin(ControlMessage):
    """Allows a worker to use its devices."""


@dataclass(frozen=True)
class DatasetWanted(ControlMessage):
    """Requests bytes of a file of the dataset folder, from offset ``start`` on."""

    file: str
    start: int


@dataclass(frozen=True)
class DatasetPart(ControlMessage):
    """Answers DatasetWanted with bytes of the file."""

    data: str
    """Bytes encoded in base64; empty at the end of the file."""


@dataclass(frozen=True)
class RendezvousAddress(ControlMessage):
    """Says that rank 0 listens at ``address`` for the other ranks."""

    address: str


@dataclass(frozen=True)
class Ready(ControlMessage):
    """Says that the worker has loaded everything that it needs and can start its work."""

    address: str = ""
    """Address at which a rank receives features; empty for other workers."""
    done_steps: int = 0
    """Optimizer steps of the checkpoint from which a rank resumes; 0 for other workers."""


@dataclass(frozen=True)
class Start(ControlMessage):
    """Starts the work of trainer ranks, because every worker is ready."""


@dataclass(frozen=True)
class Capture(ControlMessage):
    """Asks an engine to capture a batch of samples of the dataset, cycle or task that it has loaded last."""

    batch: int
    samples: list[tuple[int, int, list[str]]]
    """Request id, sample id and destination addresses of each sample."""


@dataclass(frozen=True)
class Captured(ControlMessage):
    """Says that an engine has sent every sample of a batch to its destinations."""

    batch: int


@dataclass(frozen=True)
class Released(ControlMessage):
    """Says that a rank has copied samples, so that their transport memory is free."""

    rank: int
    request_ids: list[int]


@dataclass(frozen=True)
class StepDone(ControlMessage):
    """Says that a rank has done ``steps`` optimizer steps, and asks whether to continue."""

    steps: int


@dataclass(frozen=True)
class Proceed(ControlMessage):
    """Answers StepDone: whether to continue. Every rank gets the same answer after the same step."""

    proceed: bool
    prefill_s: float = 0.0
    """Seconds that engines have spent on captures in this cycle of a run that decodes."""


@dataclass(frozen=True)
class StepShown(ControlMessage):
    """Carries the metrics of a step from rank 0 to the progress display."""

    record: dict[str, Any]


@dataclass(frozen=True)
class Trained(ControlMessage):
    """Carries the sample ids of a step for the file ``trained-RANK.jsonl`` of data-parallel rank ``rank``."""

    rank: int
    row: dict[str, Any]


@dataclass(frozen=True)
class Finished(ControlMessage):
    """Says that a rank has done its work, or has stopped on request."""

    interrupted: str | None = None
    """Message for the user if the rank stopped early; None if nothing is left to do."""
    result: dict[str, Any] = field(default_factory=dict[str, Any])
    """Result of the task that the rank has performed; empty if it has trained."""


@dataclass(frozen=True)
class TrainCycle(ControlMessage):
    """Starts training on the answers of one cycle, which decoders have generated; they are on disk."""

    number: int
    steps: tuple[int, int]
    """First step of the cycle, and first step after the cycle."""
    start_step: int
    """Step of the checkpoint that the ranks start from; 0 for initial weights."""
    notes: dict[str, Any]
    """Fields that are added to the record of every step."""


@dataclass(frozen=True)
class Perform(ControlMessage):
    """Asks a trainer rank to perform a task on samples that are in memory only; engines capture them."""

    entry: str
    """The task's function (``RankTask.entry``)."""
    arguments: dict[str, Any]
    """The function's last argument (``RankTask.arguments``)."""
    samples: list[tuple[str, str]]
    """Token ids (int32, little-endian) and packed loss mask of each sample, encoded in base64."""
    steps: tuple[int, int]
    """First step of the task, and first step after it."""
    settings: dict[str, Any]
    """Fields of BatchSettings whose values may differ from the run's."""
    start_step: int
    """Step of the checkpoint that the task starts from; 0 for initial weights."""
    notes: dict[str, Any]
    """Fields that are added to the record of every step."""


@dataclass(frozen=True)
class Serve(ControlMessage):
    """Asks a decoder to serve the draft in ``folder``."""

    version: int
    folder: str


@dataclass(frozen=True)
class Served(ControlMessage):
    """Answers Serve: the decoder serves the draft now."""


@dataclass(frozen=True)
class Generate(ControlMessage):
    """Asks a decoder to answer a portion of the prompts."""

    prompts: list[list[int]]
    seed: int


@dataclass(frozen=True)
class Generated(ControlMessage):
    """Answers Generate with the generated answers, in the order of the prompts."""

    answers: list[tuple[list[int], list[int], list[int]]]
    """``token_ids``, ``guess_depths`` and ``verifications`` of the Generation of each answer."""
    counters: dict[str, Any]
    """Fields of an AcceptanceCounters object for this portion."""
    seconds: float
    """Seconds that the engine took for this portion."""


@dataclass(frozen=True)
class Exported(ControlMessage):
    """Says that rank 0 has exported the draft after ``version`` steps, to be measured by the decoders."""

    version: int
    folder: str


@dataclass(frozen=True)
class Measured(ControlMessage):
    """Answers Exported with the figures that the decoders measured, such as the acceptance length."""

    figures: dict[str, Any]
    """Fields for the record of a step; empty if the run was asked to stop in the meantime."""


@dataclass(frozen=True)
class Stop(ControlMessage):
    """Asks the worker to exit."""


@dataclass(frozen=True)
class Failed(ControlMessage):
    """Says that the worker exits because of an error."""

    error: str
    """Name of the exception's class."""
    message: str
    """First line of the exception's message."""
    usage: bool
    """Whether the exception is a UsageError."""
