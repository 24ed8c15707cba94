"""A run whose engines and trainer ranks are stand-ins of measured speed, for the real controller.

Time is simulated: the stand-ins say the next thing that happens, and the clock goes there. What the controller has is
real: its dispatcher, its messages, and a socket to each worker, whose other end a stand-in holds in the same process.
"""

from __future__ import annotations

import heapq
import json
import random
import socket
import time
from collections import Counter, defaultdict, deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from spec_core import Launcher, WorkerEnded
from spec_core.records import FeatureSchema
from spec_processes import ChannelWorker, ControlChannel, WorkerInbox
from spec_processes.sockets.framed_socket import FramedSocket
from spec_trainer.data.dataset import Dataset, Sample
from spec_trainer.data.report import DataReport
from spec_trainer.run.batch_schedule import BatchSchedule
from spec_trainer.workers import protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from spec_core import LaunchContext, LauncherConfig, WorkerHandle, WorkerMessage, WorkerSpec
    from spec_trainer.run.spec import RunSpec

RESULTS = Path(__file__).parent / "results"
CAPTURE = RESULTS / "h200-capture.json"
STEP = RESULTS / "h200-x2-disaggregated-eagle3.json"
SCHEMA = FeatureSchema(layers=(2, 18, 33, 36), hidden_size=4096, dtype="bfloat16")
"""Features of those measurements."""
MEAN_TOKENS = 2048
ENGINE_START_S = 60.0
"""Time that an engine takes to load its target."""


@dataclass(frozen=True)
class MeasuredSpeed:
    """How long engines and ranks take for their tokens, as it was measured on H200s."""

    capture_s_per_token: Sequence[float]
    """Speed of repeated captures."""
    step_s_per_token: Sequence[tuple[float, float]]
    """Quantiles of a trainer's interval between two steps: (share of the steps, value)."""

    @classmethod
    def read(cls) -> MeasuredSpeed:
        """Read what ``results`` has."""
        capture = json.loads(CAPTURE.read_text())["vllm"]
        step = json.loads(STEP.read_text())
        tokens = step["settings"]["samples_per_step"] * step["settings"]["case"]["tokens"]
        interval = step["both"]["interval_ms"]
        return cls(
            [seconds / (capture["samples"] * capture["tokens"]) for seconds in capture["capture_s"]],
            [
                (share, interval[name] / 1e3 / tokens)
                for share, name in ((0.1, "p10"), (0.5, "median"), (0.9, "p90"))
            ],
        )

    def capture_s(self, tokens: int, draw: random.Random) -> float:
        """Draw the time that an engine takes for so many tokens."""
        return tokens * draw.choice(self.capture_s_per_token)

    def step_s(self, tokens: int, draw: random.Random) -> float:
        """Draw the time that a rank takes to train so many tokens."""
        shares, values = zip(*self.step_s_per_token, strict=True)
        return tokens * float(np.interp(draw.random(), shares, values))


def random_data(num_samples: int) -> Dataset:
    """Return samples of 512 to 3,584 tokens, of which none are read."""
    lengths = np.random.default_rng(0).integers(MEAN_TOKENS // 4, MEAN_TOKENS * 7 // 4 + 1, num_samples)
    ids = np.zeros(MEAN_TOKENS * 2, dtype=np.int32)
    mask = np.ones(len(ids), dtype=bool)
    samples = (Sample(number, ids[:length], mask[:length]) for number, length in enumerate(lengths.tolist()))
    return Dataset(tuple(samples), (), DataReport())


@dataclass(eq=False, kw_only=True)
class StandIn(ChannelWorker):
    """A worker: the controller's end of its channel, and its own."""

    index: int
    end: ControlChannel
    socket: FramedSocket
    written: deque[StandIn]
    """Workers to which the controller has sent something that they have not read."""
    killed: bool = False

    def send(self, message: dict[str, Any]) -> None:
        """Send a message, as the controller does to any worker."""
        super().send(message)
        self.written.append(self)

    def ending(self) -> WorkerEnded:
        """Return the end of a worker that has closed its channel."""
        how = "was killed by signal 9" if self.killed else "ended with exit code 0"
        return WorkerEnded(self, how, self.killed)


@dataclass
class Rank:
    """A trainer rank: what has arrived of each step, and what it waits for."""

    worker: StandIn
    address: str = ""
    step: int = 0
    missing: Counter[int] = field(default_factory=Counter)
    """Step -> samples that have not arrived."""
    held: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Step -> request ids of samples that have arrived and that the rank has not taken."""
    arrived: set[int] = field(default_factory=set)
    """Request ids of samples that have arrived: of two captures of one, the second is dropped."""


class SimulatedLauncher(Launcher):
    """Starts stand-ins. Their time is simulated and their CPU time counted apart from the controller's."""

    name = "simulated"
    api_version = 1

    def __init__(self, config: LauncherConfig, context: LaunchContext) -> None:
        """Prepare; nothing starts."""
        super().__init__(config, context)
        self.own_cpu_s = 0.0
        """CPU time of the stand-ins."""
        self.marks: dict[str, float] = {}
        """CPU time of the controller when something began."""
        self.messages = self.work_messages = 0
        """Messages that the controller has sent and received; those from the first capture to the last step."""
        self.clock_s = 0.0
        self.waited_s: list[float] = []
        """Simulated seconds of each step that the ranks have waited for features."""
        self._inbox = WorkerInbox(context.peer_s)
        self._written: deque[StandIn] = deque()
        self._workers: list[StandIn] = []
        self._underway = 0
        """Messages and endings that the controller has not received."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = count()
        self._engines: dict[str, float] = {}
        """Engine -> when it will have captured all that it was sent."""
        self._in_hand: dict[str, set[int]] = {}
        """Engine -> request ids of samples that it was sent and has not captured."""
        self._to_recover: set[int] = set()
        """Request ids of samples that a killed engine had in hand, until another one has captured them."""
        self._killed_s = 0.0
        self.num_lost = 0
        """Samples that the killed engine had in hand."""
        self.recovered_s = 0.0
        """Simulated seconds from its death until they were captured."""
        self._ranks: list[Rank] = []
        self._answers = 0
        self._stepped_s = 0.0

    def simulate(
        self, spec: RunSpec, speed: MeasuredSpeed, slow: dict[str, float], kills: bool = False
    ) -> None:
        """Take what the stand-ins are to know.

        ``slow``: how many times slower some workers are. ``kills``: an engine dies in the middle of the run.
        """
        self._kill_step = spec.schedule.total_steps // 2 if kills else -1
        self._schedule = BatchSchedule(spec.dataset, spec.schedule.settings)  # of caches of its own
        self._speed, self._slow, self._draw = speed, slow, random.Random(0)

    def num_devices(self) -> int:
        """Return more devices than any run here has workers."""
        return 1 << 20

    def start(self, workers: Sequence[WorkerSpec]) -> dict[str, WorkerHandle]:
        """Start a stand-in for each worker; each is ready at once."""
        with self._own_time():
            self.marks["start"] = self.controller_cpu_s()
            started = {spec.name: self._start(spec.name, spec.arguments["index"]) for spec in workers}
            self._ranks = [Rank(worker, name) for name, worker in started.items() if "trainer" in name]
            self._engines = {name: 0.0 for name in started if "engine" in name}
            self._in_hand = {name: set() for name in self._engines}
            self._tell(self._ranks[0].worker, protocol.RendezvousAddress("rank 0:1"))
            for name, worker in started.items():
                self._tell(worker, protocol.Ready(address=name))
        return dict(started)

    def receive(self, deadline_s: float = float("inf")) -> WorkerMessage | WorkerEnded | None:
        """Let simulated time pass until a worker has something to say."""
        if not self._underway:
            with self._own_time():
                while not self._underway:
                    self._advance()
        self._underway -= 1
        return self._inbox.receive()

    def replace(self, worker: WorkerHandle) -> WorkerHandle:
        """Start another stand-in, which is ready after ``ENGINE_START_S`` (L11)."""
        with self._own_time():
            dead = cast("StandIn", worker)
            self._inbox.forget(dead)
            dead.channel.close()
            started = self._start(dead.name, dead.index)
            self._engines[dead.name] = self.clock_s + ENGINE_START_S
            self._at(self._engines[dead.name], lambda: self._tell(started, protocol.Ready()))
        return started

    def wake(self) -> None:
        """Do nothing: nobody requests a stop."""

    def stop(self, grace_s: float) -> None:
        """Do nothing: the run itself waits for the ends of its workers."""

    def forget(self) -> None:
        """Give the sockets back."""
        for worker in self._workers:
            worker.channel.close()
        self._inbox.close()

    def controller_cpu_s(self) -> float:
        """Return the CPU time of the process without that of the stand-ins."""
        return time.process_time() - self.own_cpu_s

    @contextmanager
    def _own_time(self) -> Iterator[None]:
        started = time.thread_time()
        try:
            yield
        finally:
            self.own_cpu_s += time.thread_time() - started

    def _start(self, name: str, index: int) -> StandIn:
        ours, theirs = socket.socketpair()
        worker = StandIn(
            name,
            ControlChannel(ours, self.context.peer_s),
            index=index,
            end=ControlChannel(theirs),
            socket=FramedSocket(theirs, 1 << 30),
            written=self._written,
        )
        self._inbox.add(worker)
        self._workers.append(worker)
        return worker

    def _tell(self, worker: StandIn, message: protocol.ControlMessage) -> None:
        worker.end.send("message", message=message.to_json())
        self._underway += 1
        self.messages += 1

    def _advance(self) -> None:
        """Read what the controller has sent; where it has sent nothing, go to the next event."""
        if self._written:
            worker = self._written.popleft()
            if worker.killed:
                return
            self.messages += 1
            envelope = json.loads(worker.socket.receive())
            self._act(worker, protocol.from_json(envelope["message"]))
        else:
            self.clock_s, _, happen = heapq.heappop(self._events)
            happen()

    def _at(self, when_s: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when_s, next(self._sequence), happen))

    def _act(self, worker: StandIn, message: protocol.ControlMessage) -> None:
        match message:
            case protocol.Capture(batch, samples):
                self._capture(worker, batch, samples)
            case protocol.Start():
                if "work" not in self.marks:
                    self.marks["work"], self.messages = self.controller_cpu_s(), 0
                if worker.index == 0:
                    self._begin_step(0)
            case protocol.Proceed():
                self._answers += 1
                if self._answers == len(self._ranks):
                    self._answers = 0
                    self._go_on()
            case protocol.Stop():
                if "stop" not in self.marks:
                    self.marks["stop"], self.work_messages = self.controller_cpu_s(), self.messages
                worker.end.close()
                self._underway += 1
            case _:
                pass

    def _capture(self, worker: StandIn, batch: int, samples: Sequence[tuple[int, int, list[str]]]) -> None:
        tokens = sum(self._schedule.dataset.lengths[sample_id] for _, sample_id, _ in samples)
        taken_s = self._speed.capture_s(tokens, self._draw) * self._slow.get(worker.name, 1.0)
        done_s = max(self.clock_s, self._engines[worker.name]) + taken_s
        self._engines[worker.name] = done_s
        self._in_hand[worker.name] |= {request_id for request_id, _, _ in samples}
        self._at(done_s, lambda: self._captured(worker, batch, samples))

    def _captured(self, worker: StandIn, batch: int, samples: Sequence[tuple[int, int, list[str]]]) -> None:
        if worker.killed:
            return
        self._tell(worker, protocol.Captured(batch))
        for request_id, _, addresses in samples:
            self._in_hand[worker.name].discard(request_id)
            self._to_recover.discard(request_id)
            step = request_id // (2 * len(self._schedule.dataset.lengths))
            for address in addresses:
                self._arrived(self._ranks[int(address.rpartition("-")[2])], step, request_id)
        if self.num_lost and not self._to_recover and not self.recovered_s:
            self.recovered_s = self.clock_s - self._killed_s

    def _kill(self, name: str) -> None:
        """Have an engine die with its hands full."""
        worker = next(one for one in self._workers if one.name == name)
        worker.killed = True
        self._to_recover, self._in_hand[name] = self._in_hand[name], set()
        self._killed_s, self.num_lost = self.clock_s, len(self._to_recover)
        worker.end.close()
        self._underway += 1

    def _arrived(self, rank: Rank, step: int, request_id: int) -> None:
        if request_id in rank.arrived:
            return
        rank.arrived.add(request_id)
        rank.held[step].append(request_id)
        if rank.step == step and rank.missing[step]:
            self._take(rank, step)
            if not rank.missing[step]:
                self._complete()

    def _take(self, rank: Rank, step: int) -> None:
        """Copy what has arrived of a step, and give its memory back."""
        if request_ids := rank.held.pop(step, ()):
            rank.missing[step] -= len(request_ids)
            self._tell(rank.worker, protocol.Released(rank.worker.index, list(request_ids)))

    def _begin_step(self, step: int) -> None:
        """Let every rank lay out a step's batches and take what has arrived."""
        self._waiting = 0
        if step == self._kill_step:
            self._kill("engine-0")
        for rank in self._ranks:
            rank.step = step
            self._lay_out(rank, step)
            self._waiting += rank.missing[step] > 0
        if not self._waiting:
            self._train()

    def _lay_out(self, rank: Rank, step: int) -> None:
        if step not in rank.missing and step in self._schedule.steps:
            share = self._schedule.share(self._schedule.train_item(step), rank.worker.index)
            rank.missing[step] = sum(map(len, share))
        self._take(rank, step)

    def _complete(self) -> None:
        self._waiting -= 1
        if not self._waiting:
            self._train()

    def _train(self) -> None:
        """Train a step on all ranks, which meet in its end, and prepare the next one meanwhile."""
        self.waited_s.append(self.clock_s - self._stepped_s)
        step = self._ranks[0].step
        item = self._schedule.train_item(step)
        longest = 0.0
        for rank in self._ranks:
            share = self._schedule.share(item, rank.worker.index)
            tokens = sum(self._schedule.dataset.lengths[sample] for part in share for sample in part)
            taken_s = self._speed.step_s(tokens, self._draw) * self._slow.get(rank.worker.name, 1.0)
            longest = max(longest, taken_s)
            self._lay_out(rank, step + 1)
        self._at(self.clock_s + longest, self._ask)

    def _ask(self) -> None:
        self._stepped_s = self.clock_s
        step = self._ranks[0].step
        self._tell(self._ranks[0].worker, protocol.StepShown(_record(step + 1)))
        for rank in self._ranks:
            rank.missing.pop(step)
            self._tell(rank.worker, protocol.StepDone(step + 1))

    def _go_on(self) -> None:
        step = self._ranks[0].step + 1
        if step < self._schedule.total_steps:
            self._begin_step(step)
            return
        for rank in self._ranks:
            self._tell(rank.worker, protocol.Finished())


def _record(step: int) -> dict[str, Any]:
    return cast(
        "dict[str, Any]",
        {
            "step": step,
            "loss": 1.0,
            "acceptance_length": 2.0,
            "tokens_per_s": 1.0,
            "time_step_s": 1.0,
            "time_data_s": 0.0,
        },
    )
