"""Messages between the controller of a run and its workers, the same for every launcher.

::

    worker                      controller
      ◄──────────────────── order     what the worker is
      ◄──────────────────── Begin     to a worker that waits for others of its device
    DatasetWanted ────────────►       from a worker whose host does not see the run directory; answered by DatasetPart
    RendezvousAddress ────────►       from trainer rank 0: where the ranks meet; passed on to the others
    Ready ────────────────────►
      ◄──────────────────── Start     to trainer ranks, once every worker is ready
      ◄──────────────────── Capture   to engines, also to one that is ready in place of another; answered by Captured
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

      ◄──────────────────── Serve       to decoders; answered by Serving
      ◄──────────────────── Generate    to decoders; answered by Generated
      ◄──────────────────── TrainCycle  to engines and ranks; a rank answers Ready, and what follows that goes on
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ControlMessage:
    """A message; its fields hold what JSON can hold."""

    def to_json(self) -> dict[str, Any]:
        """Return the message as an object that JSON can hold; it shares what the fields hold."""
        return {"kind": type(self).__name__, **vars(self)}


def from_json(fields: dict[str, Any]) -> ControlMessage:
    """Return the message that ``to_json`` has written."""
    values = fields.copy()
    return _types()[values.pop("kind")](**values)


@functools.cache
def _types() -> dict[str, type[ControlMessage]]:
    """Return the messages by name."""
    return {message.__name__: message for message in ControlMessage.__subclasses__()}


@dataclass(frozen=True, kw_only=True)
class WorkerOrder:
    """Description of a worker: the order of its WorkerSpec."""

    name: str
    program: str
    """Function as ``package.module:name``, called with an ExitStack, a ControllerLink and this order."""
    index: int
    """Number of the engine replica or trainer rank."""
    memory_fraction: float | None
    """Share of each device's memory that the worker may take; None for no limit."""
    init_order: int
    """A worker touches no device before all workers of lower numbers are ready; above 0 it waits for Begin."""
    config: dict[str, Any]
    """The resolved configuration of the run."""
    token: str
    """Secret that the ranks of a run share."""
    dataset: str
    """Folder of the tokenised dataset."""


@dataclass(frozen=True)
class Begin(ControlMessage):
    """The worker may touch its devices."""


@dataclass(frozen=True)
class DatasetWanted(ControlMessage):
    """The worker asks for what a file of the dataset's folder has from ``start`` on."""

    file: str
    start: int


@dataclass(frozen=True)
class DatasetPart(ControlMessage):
    """Answer to DatasetWanted."""

    data: str
    """Bytes in base64; empty at the end of the file."""


@dataclass(frozen=True)
class RendezvousAddress(ControlMessage):
    """Rank 0 listens at ``address`` for the other ranks."""

    address: str


@dataclass(frozen=True)
class Ready(ControlMessage):
    """The worker has loaded everything."""

    address: str = ""
    """Address at which a rank receives features; empty for others."""
    done_steps: int = 0
    """Optimizer steps that a rank has found done."""


@dataclass(frozen=True)
class Start(ControlMessage):
    """Every worker is ready."""


@dataclass(frozen=True)
class Capture(ControlMessage):
    """An engine is to capture a batch of samples, whose token ids it reads from the dataset."""

    batch: int
    samples: list[tuple[int, int, list[str]]]
    """Request id, sample id and destinations of each."""


@dataclass(frozen=True)
class Captured(ControlMessage):
    """Every sample of a batch was sent to its destination."""

    batch: int


@dataclass(frozen=True)
class Released(ControlMessage):
    """A rank has copied samples: their transport memory is free."""

    rank: int
    request_ids: list[int]


@dataclass(frozen=True)
class StepDone(ControlMessage):
    """A rank has done ``steps`` steps and asks whether to proceed."""

    steps: int


@dataclass(frozen=True)
class Proceed(ControlMessage):
    """Answer to StepDone, the same to every rank after the same step."""

    proceed: bool
    prefill_s: float = 0.0
    """Seconds that engines have captured for, in this cycle of a run that decodes."""


@dataclass(frozen=True)
class StepShown(ControlMessage):
    """The record of a step, for the progress display."""

    record: dict[str, Any]


@dataclass(frozen=True)
class Trained(ControlMessage):
    """A data-parallel rank has trained samples: a row of its file in the run directory."""

    rank: int
    row: dict[str, Any]


@dataclass(frozen=True)
class Finished(ControlMessage):
    """A rank has done its work, or has stopped on request."""

    interrupted: str | None = None
    """Explanation for the user of what is left; None if nothing is."""


@dataclass(frozen=True)
class TrainCycle(ControlMessage):
    """A cycle of a run that decodes begins, whose answers are on disk."""

    number: int
    steps: tuple[int, int]
    """Its first step, and the first one after it."""
    resume_from: str
    """``train.resume_from`` of the ranks."""
    notes: dict[str, Any]
    """Fields of the record of every step."""


@dataclass(frozen=True)
class Serve(ControlMessage):
    """A decoder is to serve the draft in ``folder``."""

    version: int
    folder: str


@dataclass(frozen=True)
class Serving(ControlMessage):
    """A decoder serves the draft that it was to serve."""


@dataclass(frozen=True)
class Generate(ControlMessage):
    """A decoder is to answer a portion of prompts."""

    prompts: list[list[int]]
    seed: int


@dataclass(frozen=True)
class Generated(ControlMessage):
    """The answers to a portion, in order."""

    answers: list[tuple[list[int], list[int], list[int]]]
    """New tokens of each, the guess places of these or nothing, and its verifications or nothing."""
    counters: dict[str, Any]
    """Fields of the AcceptanceCounters of this portion."""
    seconds: float
    """Duration of this portion in the engine."""


@dataclass(frozen=True)
class Exported(ControlMessage):
    """Rank 0 has exported the draft as it is after ``version`` steps, to be measured by the decoders."""

    version: int
    folder: str


@dataclass(frozen=True)
class Measured(ControlMessage):
    """Answer to Exported."""

    figures: dict[str, Any]
    """Fields of the records of steps; none if the run was asked to stop meanwhile."""


@dataclass(frozen=True)
class Stop(ControlMessage):
    """The worker is to end."""


@dataclass(frozen=True)
class Failed(ControlMessage):
    """The worker ends because of an error."""

    error: str
    """Name of the exception's class."""
    message: str
    """First line of its text."""
    usage: bool
    """True for a UsageError."""
