"""AgreedProcessGroup runs collectives of a library that does not detect dead or mistaken peers.

If a peer has died or makes another call, such a library waits on the device without an error. So the hosts first
agree on every call by a gloo group of the same members. This step detects a dead, silent or mistaken peer within
the timeout, before anything is queued on the device. Then the library's call is queued, and the host continues. If
a peer dies between these two steps, the stream waits until this group's next call, ``abort`` or ``close``.
"""

from __future__ import annotations

import contextlib
import threading
import time
import zlib
from abc import abstractmethod
from collections.abc import Generator
from typing import ClassVar, Protocol

import torch

from spec_core import Rendezvous
from spec_core.errors import ConfigError, PeerLost, ProtocolError, RunError
from spec_kit.collectives.gloo_process_group import GlooProcessGroup
from spec_kit.collectives.library_process_group import CollectiveLibrary, LibraryProcessGroup

SETUP_S = 20.0
"""Shortest time limit, in seconds, for the library's work in a call that all peers have agreed on, even if the
group's timeout is shorter. The library connects at first use, which takes seconds on a busy host."""
_POLL_S = 1e-3


class Communicator(CollectiveLibrary, Protocol):
    """A communicator of all ranks, on one device."""

    def check(self) -> None:
        """Raise RunError if the library reports an error of this communicator, such as a lost peer."""

    def abort(self) -> None:
        """Free the communicator; queued calls fail. Idempotent; any thread may call it."""


class AgreedProcessGroup(LibraryProcessGroup):
    """A process group on devices, which all ranks construct. Raises ConfigError if ranks share a device."""

    library: ClassVar[str]
    """Name of the collective library, for messages."""

    def __init__(self, rendezvous: Rendezvous, device: torch.device) -> None:
        """Build the group. Every member of the rendezvous must call this."""
        super().__init__(rendezvous.rank, rendezvous.world_size, device)
        self._timeout_s = rendezvous.timeout_s
        self._device_module = torch.get_device_module(device)
        self._issuing = threading.Lock()
        """Held during a call: only one thread at a time may use the communicator."""
        self._communicator: Communicator | None = None
        self._hosts: GlooProcessGroup | None = None
        self._queued = self._device_module.Event()
        """Device event that is recorded after each call."""
        self._refuse_shared_devices(rendezvous)
        try:
            self._build(rendezvous)
        except BaseException:
            self.abort()
            raise

    @abstractmethod
    def _device_id(self) -> str:
        """Return the name of this rank's device, the same in every process of the host."""

    @abstractmethod
    def _connect(self, rendezvous: Rendezvous, deadline: float) -> Communicator:
        """Return a communicator of all ranks; called on the group's device."""

    def abort(self) -> None:
        """Abort the gloo group, which unblocks the hosts, and the calls queued on the devices (P7)."""
        if self._hosts is not None:
            self._hosts.abort()
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.abort()

    def close(self) -> None:
        """Wait until the queued calls are done, for at most the timeout, and end the group (P9)."""
        deadline = time.monotonic() + self._timeout_s
        while self._is_busy() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        self.abort()

    def _build(self, rendezvous: Rendezvous) -> None:
        self._hosts = GlooProcessGroup(rendezvous)
        with self._device_module.device(self.device):
            self._communicator = self._connect(rendezvous, self._deadline())

    def _is_busy(self) -> bool:
        communicator = self._communicator
        if communicator is None or self._queued.query():
            return False
        with contextlib.suppress(RunError):
            communicator.check()
            return True
        return False

    @contextlib.contextmanager
    def _call(
        self, name: str, size: int, peer: int | None = None, *, sends: bool = False
    ) -> Generator[tuple[CollectiveLibrary, float]]:
        """Yield the library and a deadline once all ranks, or ``peer``, make this call with this size."""
        hosts = self._hosts
        if hosts is None:
            raise PeerLost(f"rank {self.rank}: {name} on a group that was never built")
        with self._issuing, self._device_module.device(self.device):
            try:
                if peer is None:
                    self._agree_with_all(hosts, name, size)
                else:
                    self._agree_with(hosts, size, peer, sends)
                yield self._checked(name), self._deadline()
            except RunError:
                self.abort()
                raise
            self._queued.record()

    def _checked(self, call: str) -> Communicator:
        where = f"rank {self.rank} of {self.world_size}: {call}"
        communicator = self._communicator
        if communicator is None:
            raise PeerLost(f"{where}: the group was aborted")
        try:
            communicator.check()
        except RunError as error:
            raise type(error)(f"{where}: {error}") from error
        return communicator

    def _deadline(self) -> float:
        return time.monotonic() + max(self._timeout_s, SETUP_S)

    def _agree_with_all(self, hosts: GlooProcessGroup, call: str, size: int) -> None:
        mine = torch.tensor([zlib.crc32(call.encode()), size])
        for rank, theirs in enumerate(hosts.all_gather(mine)):
            if not torch.equal(mine, theirs):
                raise ProtocolError(
                    f"rank {self.rank} makes a {call} of {size} elements, rank {rank} another call"
                )

    def _agree_with(self, hosts: GlooProcessGroup, size: int, peer: int, sends: bool) -> None:
        """Exchange sizes with one peer; the rank that sends the tensor sends its size first."""
        mine = torch.tensor([size])
        theirs = torch.empty(1, dtype=torch.int64)
        if sends:
            hosts.send(mine, peer)
        hosts.recv(theirs, peer)
        if not sends:
            hosts.send(mine, peer)
        if size != int(theirs):
            raise ProtocolError(f"rank {self.rank} has {size} bytes for rank {peer}'s {int(theirs)}")

    def _refuse_shared_devices(self, rendezvous: Rendezvous) -> None:
        names = rendezvous.all_gather_json(self._device_id())
        for rank, name in enumerate(names):
            if (other := names.index(name)) != rank:
                raise ConfigError(
                    f"ranks {other} and {rank} are both on {name}, which {self.library} cannot do; give each a "
                    "device of its own (processes of one device share features with placement.kind=colocated)"
                )
