"""This module has parts of update tests: weights of unusual shapes, a DraftSlot and remote replicas."""

from __future__ import annotations

import contextlib
import gc
import secrets
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import torch
from torch import Tensor

from spec_core import DraftReplica, ServingStatus, UpdateId, UpdateRequest, WeightTransport
from spec_core.draft_replica import ReplicaCall
from spec_core.errors import PeerLost
from spec_kit.weight_sync.draft_slot import DraftLayout, DraftSlot
from spec_kit.weight_sync.publisher import Publisher
from spec_kit.weight_sync.receiver import UpdateReceiver
from spec_testing.limits import patient
from spec_testing.processes import Rank
from spec_testing.resources import Resources, settled_resources

FENCE = 10
WAIT_S = patient(60.0)
"""Longest wait, in seconds, for something that should happen at once; generous for a busy machine."""
TARGET = "digest of the suite's target"
BUCKET_BYTES = 4096
"""Bucket size of a transport under test: smaller than the largest tensor, and equal to the size of another
tensor."""
POISON = 0xA5
"""Value of every byte of the spare copy before an update is loaded."""


def odd_weights(version: int) -> dict[str, Tensor]:
    """Return weights in which every byte depends on the version, except for the vocabulary mapping.

    All values are finite.
    """
    generator = torch.Generator().manual_seed(version)

    def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
        values = raw.view(dtype)[..., 0].contiguous()
        return torch.where(values.double().isfinite(), values, torch.zeros_like(values))

    return {
        "odd": drawn(7, 3, dtype=torch.bfloat16),
        "flags": drawn(13, dtype=torch.uint8) % 2 == 0,
        "left": drawn(5, 5),
        "right": drawn(5, 5),
        "cut": drawn(3 * BUCKET_BYTES + 40, dtype=torch.int8),
        "exact": drawn(BUCKET_BYTES // 2, dtype=torch.float16),
        "scalar": drawn(dtype=torch.float64),
        "turned": drawn(6, 4).t(),
        "nothing": drawn(0, 3),
        "eighth": drawn(9, 2, dtype=torch.float8_e4m3fn),
        "d2t": torch.arange(11) * 3,
        "t2d": torch.arange(33) % 3 == 0,
    }


def same_bytes(left: Tensor, right: Tensor) -> bool:
    """Return whether two tensors are equal bit for bit, NaNs included."""
    alike = left.dtype == right.dtype and left.shape == right.shape
    return alike and torch.equal(raw_bytes(left), raw_bytes(right))


def raw_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes as a uint8 tensor on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


class ToySlot(DraftSlot):
    """A DraftSlot with two copies of a draft, without an engine.

    ``reach`` is called at each named point of an update.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        device: torch.device | None = None,
        reach: Callable[[str], None] = lambda point: None,
    ) -> None:
        """Serve ``weights`` from ``device``."""
        self._device = torch.device("cpu") if device is None else device
        self._copies = {"live": self._copied(weights), "spare": self._copied(weights)}
        self._layout = DraftLayout.of_tensors(weights.items(), TARGET)
        self._reach = reach
        self.num_loads = 0

    @property
    def device(self) -> torch.device:
        """Return the device on which new tensors should arrive."""
        return self._device

    def layout(self) -> DraftLayout:
        """Return the names, shapes and dtypes that an update must have."""
        return self._layout

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Fill the spare copy with POISON, then copy the weights into it."""
        self.num_loads += 1
        spare = self._copies["spare"]
        for tensor in spare.values():
            if tensor.numel():
                tensor.view(-1).view(torch.uint8).fill_(POISON)
        for name, tensor in weights:
            spare[name].view(-1).view(torch.uint8).copy_(tensor.contiguous().view(-1).view(torch.uint8))
            self._reach(f"load {self.num_loads}")

    def swap(self) -> None:
        """Exchange the live and the spare copy."""
        self._reach(f"before swap {self.num_loads}")
        live, spare = self._copies["live"], self._copies["spare"]
        self._copies = {"live": spare, "spare": live}
        self._reach(f"after swap {self.num_loads}")

    def serves(self, weights: Mapping[str, Tensor]) -> bool:
        """Return whether the live copy equals these weights, bit for bit."""
        return all(same_bytes(tensor, weights[name]) for name, tensor in self._copies["live"].items())

    def _copied(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(self._device, copy=True).contiguous() for name, tensor in weights.items()}


@dataclass(frozen=True)
class WeightStage:
    """The transport under test and its tensors. Each process of a test has a WeightStage."""

    build: Callable[[], WeightTransport]
    """Builds the transport, and selects the process's device if there are several."""
    device_type: str
    build_sender: Callable[[], WeightTransport] | None = None
    """Builds the publisher's transport if the publisher needs another device; None means ``build``."""
    publishes_from_cpu: bool = False
    """Whether the publisher's tensors are on the CPU, regardless of the replicas' device."""

    @property
    def device(self) -> torch.device:
        """Return this process's device; call it after a transport was built."""
        return torch.empty(0, device=self.device_type).device

    @property
    def publisher_device(self) -> torch.device:
        """Return the device of the process that publishes."""
        return torch.device("cpu") if self.publishes_from_cpu else self.device

    def weights(self, version: int) -> dict[str, Tensor]:
        """Return the weights of a version on the publisher's device."""
        return {name: tensor.to(self.publisher_device) for name, tensor in odd_weights(version).items()}

    def resources(self) -> Resources:
        """Return the resources of this process, after unused device memory was freed."""
        if not torch.empty(0, device=self.device).is_cpu:
            gc.collect()
            torch.get_device_module(self.device).synchronize()
            torch.get_device_module(self.device).empty_cache()
        return settled_resources()

    def build_publishers(self) -> WeightTransport:
        """Return a new transport for the process that publishes."""
        return (self.build_sender or self.build)()

    def publisher(self, fence: int = FENCE) -> Publisher:
        """Return a publisher that uses the transport under test."""
        transports = {"tested": self.build_publishers()}
        return Publisher(transports, TARGET, group="suite", fence=fence, device=self.publisher_device)


class StagedReceiver(UpdateReceiver):
    """A receiver that first serves version 0, and whose methods a test calls by ``RemoteReplica.ask``."""

    def __init__(
        self, stage: WeightStage, transport: WeightTransport, reach: Callable[[str], None] | None = None
    ) -> None:
        """Serve version 0, and call ``reach`` at each named point of an update.

        By default an update waits at its first point for ``let_go``.
        """
        self._stage = stage
        self._held, self._let_go = threading.Event(), threading.Event()
        self.staged_slot = ToySlot(odd_weights(0), stage.device, reach or self._hold)
        super().__init__(self.staged_slot, {"tested": transport}, group="suite")

    def serves(self, version: int) -> bool:
        """Return whether the receiver serves the version, bit for bit."""
        return self.staged_slot.serves(odd_weights(version))

    def resources(self) -> Resources:
        """Return the resources of the receiver's process."""
        return self._stage.resources()

    def is_held(self) -> bool:
        """Return whether an update waits for ``let_go`` at its first named point."""
        return self._held.is_set()

    def let_go(self) -> None:
        """Let the waiting update and all later updates continue."""
        self._let_go.set()

    def _hold(self, point: str) -> None:
        self._held.set()
        self._let_go.wait(WAIT_S)


class RemoteReplica(DraftReplica):
    """A replica of one rank, whose receiver is in another process of the test (``serve_receiver``)."""

    num_ranks = 1

    def __init__(self, address: Any, before: Callable[[str], None] = lambda call: None) -> None:
        """Connect to the receiver's process. ``before`` is called before each call, with the call's name."""
        self._connection = Client(address[0], authkey=address[1])
        self._before = before
        self._lock = threading.Lock()

    def end(self) -> None:
        """Make the other process stop serving the receiver."""
        with contextlib.suppress(OSError):
            self._connection.send(("end", ()))

    def call(self, name: ReplicaCall, argument: UpdateRequest | UpdateId | None) -> Future[ServingStatus]:
        """Call the receiver's method ``name`` in the other process."""
        return self._begin(name, *(() if argument is None else (argument,)))

    def ask(self, name: str, *args: Any) -> Any:
        """Call a method of ``StagedReceiver`` in the other process and return its result."""
        return self._begin(name, *args).result(WAIT_S)

    def _begin(self, name: str, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        threading.Thread(target=self._run, args=(future, name, args), daemon=True).start()
        return future

    def _run(self, future: Future[Any], name: str, args: tuple[Any, ...]) -> None:
        self._before(name)
        try:
            with self._lock:
                self._connection.send((name, args))
                value = self._connection.recv()
        except (OSError, EOFError) as error:
            value = PeerLost(f"the replica's process has gone: {error!r}")
        future.set_exception(value) if isinstance(value, Exception) else future.set_result(value)


@contextlib.contextmanager
def replica_of_other_rank(me: Rank) -> Generator[RemoteReplica]:
    """Yield the replica whose receiver another rank serves; then let that rank stop serving."""
    replica = RemoteReplica(me.receive()[1])
    try:
        yield replica
    finally:
        replica.end()


def serve_receiver(me: Rank, receiver: UpdateReceiver, num_clients: int = 1) -> None:
    """Serve a receiver's methods to ``num_clients`` RemoteReplicas of other ranks, until all have ended."""
    authkey = secrets.token_bytes(16)
    with Listener(("127.0.0.1", 0), authkey=authkey) as listener:
        me.publish((me.rank, (listener.address, authkey)))
        clients = [
            threading.Thread(target=_serve, args=(listener.accept(), receiver)) for _ in range(num_clients)
        ]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
    receiver.close()


def _serve(connection: Connection[Any, Any], receiver: UpdateReceiver) -> None:
    with contextlib.suppress(OSError, EOFError):
        while (request := connection.recv())[0] != "end":
            name, args = request
            try:
                answer: Any = getattr(receiver, name)(*args)
            except Exception as error:  # noqa: BLE001 (the caller gets every error)
                answer = error
            connection.send(answer)
