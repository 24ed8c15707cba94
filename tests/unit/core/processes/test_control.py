from __future__ import annotations

import socket
import struct
import threading
from typing import TYPE_CHECKING

import pytest

from spec_core.errors import PeerLost
from spec_core.processes.control import ControlChannel

if TYPE_CHECKING:
    from collections.abc import Iterator

Ends = tuple[ControlChannel, ControlChannel]


@pytest.fixture
def ends() -> Iterator[Ends]:
    one, other = (ControlChannel(end) for end in socket.socketpair())
    yield one, other
    one.close()
    other.close()


def test_records_arrive_in_order_until_the_channel_is_closed(ends: Ends) -> None:
    ends[0].send("capture", ids=[1, 2])
    ends[0].send("stop")
    ends[0].close()
    assert list(ends[1].records()) == [{"kind": "capture", "ids": [1, 2]}, {"kind": "stop"}]


def test_threads_do_not_mix_their_records(ends: Ends) -> None:
    numbers = range(200)
    threads = [
        threading.Thread(target=lambda: [ends[0].send("n", ids=[n] * 1000) for n in numbers])
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    records = ends[1].records()
    assert sum(sum(next(records)["ids"]) for _ in range(3 * len(numbers))) == 3000 * sum(numbers)
    for thread in threads:
        thread.join()


def test_a_record_that_is_cut_short_is_the_end() -> None:
    raw, end = socket.socketpair()
    channel = ControlChannel(end)
    raw.sendall(struct.pack("!I", 10) + b"{}")
    raw.close()
    assert list(channel.records()) == []
    channel.close()


def test_sending_to_nobody_is_peer_lost(ends: Ends) -> None:
    ends[1].close()
    with pytest.raises(PeerLost, match="the control channel is closed"):
        ends[0].send("alive")


def test_close_ends_a_wait_for_records(ends: Ends) -> None:
    heard: list[object] = []
    thread = threading.Thread(target=lambda: heard.extend(ends[0].records()))
    thread.start()
    ends[0].close()
    thread.join(5)
    assert not thread.is_alive()
    assert heard == []


def test_a_heartbeat_beats_until_the_channel_is_closed(ends: Ends) -> None:
    ends[0].keep_alive(0.08)
    records = ends[1].records()
    assert [next(records)["kind"] for _ in range(3)] == ["alive"] * 3
    (heart,) = (thread for thread in threading.enumerate() if thread.name == "heartbeat")
    ends[0].close()
    heart.join(5)
    assert not heart.is_alive()
    assert all(record["kind"] == "alive" for record in records)  # the stream ends


def test_a_heartbeat_ends_with_whoever_hears_it(ends: Ends) -> None:
    ends[0].keep_alive(0.08)
    ends[1].close()
    (heart,) = (thread for thread in threading.enumerate() if thread.name == "heartbeat")
    heart.join(5)
    assert not heart.is_alive()
