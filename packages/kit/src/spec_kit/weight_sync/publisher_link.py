"""PublisherLink listens for the connections of the ranks of all replicas of one update group."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable

from spec_core import UpdateId
from spec_core.errors import DeadlineExceeded, PeerLost, ProtocolError
from spec_core.resource import Resource
from spec_kit.weight_sync.messages import Greeting, UpdateChannel
from spec_processes.sockets.addresses import bind, format_address, parse_address
from spec_processes.sockets.peer_admission import AcceptLimiter, same_token

logger = logging.getLogger(__name__)


class RankEnd(UpdateChannel):
    """The publisher's side of the connection to one rank."""

    def __init__(self, end: socket.socket, greeting: Greeting) -> None:
        """Take ownership of the socket ``end``, on which ``greeting`` has arrived."""
        super().__init__(end, f"rank {greeting.rank} of replica {greeting.replica!r}")
        self.rank, self.locations, self.unusable = greeting.rank, greeting.locations, greeting.unusable


class ExpectedRanks(Resource):
    """The ranks of one replica that must connect for one update, and their connections."""

    def __init__(
        self, update: UpdateId, replica: str, num_ranks: int, forget: Callable[[ExpectedRanks], None]
    ) -> None:
        """Expect ranks 0 to ``num_ranks`` - 1. ``close`` calls ``forget`` with this object."""
        self.update = update
        self.replica = replica
        self.token = secrets.token_hex(16)
        self._num_ranks = num_ranks
        self._forget = forget
        self._ends: dict[int, RankEnd] = {}
        self._changed = threading.Condition()
        self._closed = False

    def wait(self, deadline: float) -> list[RankEnd]:
        """Wait until all ranks have connected, and return their connections in rank order.

        Raise DeadlineExceeded, with the missing ranks in its message, or PeerLost after ``cancel``.
        """
        with self._changed:
            left = max(0.0, deadline - time.monotonic())
            self._changed.wait_for(lambda: self._closed or len(self._ends) == self._num_ranks, left)
            if self._closed:
                raise PeerLost(f"the update of replica {self.replica!r} was given up")
            if missing := sorted(set(range(self._num_ranks)) - self._ends.keys()):
                raise DeadlineExceeded(
                    f"ranks {missing} of replica {self.replica!r} did not connect before the deadline of the update"
                )
            return [self._ends[rank] for rank in sorted(self._ends)]

    def admit(self, greeting: Greeting, end: socket.socket) -> None:
        """Accept the connection of a rank. Raise ProtocolError if the rank is not expected."""
        with self._changed:
            if self._closed or greeting.rank in self._ends or not 0 <= greeting.rank < self._num_ranks:
                raise ProtocolError(f"rank {greeting.rank} of replica {self.replica!r} is not expected")
            self._ends[greeting.rank] = RankEnd(end, greeting)
            self._changed.notify_all()

    def cancel(self) -> None:
        """Shut down every connection, and wake the threads that wait; any thread may call it."""
        with self._changed:
            self._closed = True
            for end in self._ends.values():
                end.shutdown()
            self._changed.notify_all()

    def close(self) -> None:
        """Close the connections; no other thread may use them any more."""
        self._forget(self)
        self.cancel()
        for end in self._ends.values():
            end.close()


class PublisherLink(Resource):
    """Accepts connections of ranks until ``close``; a peer without the token of an update is disconnected."""

    def __init__(self, address: str) -> None:
        """Listen at ``address`` (``host:port``); port 0 selects a free port."""
        host, port = parse_address(address)
        listener = bind(host, port)
        self.address = format_address(host, listener.getsockname()[1])
        self._lock = threading.Lock()
        self._expected: dict[tuple[UpdateId, str], ExpectedRanks] = {}
        self._limiter = AcceptLimiter(listener)
        self._thread = threading.Thread(target=self._accept, name="weight publisher link", daemon=True)
        self._thread.start()

    def expect(self, update: UpdateId, replica: str, num_ranks: int) -> ExpectedRanks:
        """Let the ranks of ``replica`` connect for ``update``, until the returned object is closed."""
        expected = ExpectedRanks(update, replica, num_ranks, self._forget)
        with self._lock:
            self._expected[update, replica] = expected
        return expected

    def close(self) -> None:
        """Stop listening; threads that wait for ranks get PeerLost."""
        self._limiter.close()
        self._thread.join()
        with self._lock:
            expected = list(self._expected.values())
        for ranks in expected:
            ranks.cancel()

    def _forget(self, ranks: ExpectedRanks) -> None:
        with self._lock:
            self._expected.pop((ranks.update, ranks.replica), None)

    def _accept(self) -> None:
        for connection, packet in self._limiter.first_packets():
            try:
                greeting = Greeting.decode(packet)
                self._ranks_for(greeting).admit(greeting, connection)
            except ProtocolError as error:
                logger.debug("refused a connection: %s", error)
                connection.close()

    def _ranks_for(self, greeting: Greeting) -> ExpectedRanks:
        with self._lock:
            ranks = self._expected.get((greeting.update, greeting.replica))
        if ranks is None or not same_token(greeting.token, ranks.token):
            raise ProtocolError(f"no update expects replica {greeting.replica!r}")
        return ranks
