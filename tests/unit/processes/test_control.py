import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from spec_core.errors import PeerLost
from spec_processes.control import ControlChannel

Ends = tuple[ControlChannel, ControlChannel]


@pytest.fixture
def ends() -> Iterator[Ends]:
    one, other = (ControlChannel(end) for end in socket.socketpair())
    yield one, other
    one.close()
    other.close()


def test_messages_arrive_in_order_until_the_channel_is_closed(ends) -> None:
    ends[0].send("capture", ids=[1, 2])
    ends[0].send("stop")
    ends[0].close()
    assert list(ends[1].messages()) == [{"kind": "capture", "ids": [1, 2]}, {"kind": "stop"}]


def test_threads_do_not_mix_their_messages(ends) -> None:
    numbers = range(200)
    threads = [
        threading.Thread(target=lambda: [ends[0].send("n", ids=[n] * 1000) for n in numbers])
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    messages = ends[1].messages()
    assert sum(sum(next(messages)["ids"]) for _ in range(3 * len(numbers))) == 3000 * sum(numbers)
    for thread in threads:
        thread.join()


def test_a_message_that_is_cut_short_is_the_end() -> None:
    raw, end = socket.socketpair()
    channel = ControlChannel(end)
    raw.sendall(struct.pack("!I", 10) + b"{}")
    raw.close()
    assert list(channel.messages()) == []
    channel.close()


def test_sending_to_nobody_is_peer_lost(ends) -> None:
    ends[1].close()
    with pytest.raises(PeerLost, match="the control channel is closed"):
        ends[0].send("alive")


def test_close_ends_a_wait_for_messages(ends) -> None:
    received: list[object] = []
    thread = threading.Thread(target=lambda: received.extend(ends[0].messages()))
    thread.start()
    ends[0].close()
    thread.join(5)
    assert not thread.is_alive()
    assert received == []


def test_a_heartbeat_beats_until_the_channel_is_closed(ends) -> None:
    ends[0].keep_alive(0.08)
    messages = ends[1].messages()
    assert [next(messages)["kind"] for _ in range(3)] == ["alive"] * 3
    (heart,) = (thread for thread in threading.enumerate() if thread.name == "heartbeat")
    ends[0].close()
    heart.join(5)
    assert not heart.is_alive()
    assert all(message["kind"] == "alive" for message in messages)  # the stream ends


def test_a_heartbeat_ends_with_whoever_receives_it(ends) -> None:
    ends[0].keep_alive(0.08)
    ends[1].close()
    (heart,) = (thread for thread in threading.enumerate() if thread.name == "heartbeat")
    heart.join(5)
    assert not heart.is_alive()
