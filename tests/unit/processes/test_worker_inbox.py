"""The inbox of a launcher: one thread reads every worker, silence is the end, and a wait can be cut short."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from spec_core import WorkerEnded, WorkerMessage
from spec_processes import ChannelWorker, ControlChannel, WorkerInbox, worker_inbox

Add = Callable[[str], tuple[ChannelWorker, ControlChannel]]


@dataclass(eq=False)
class Worker(ChannelWorker):
    def ending(self) -> WorkerEnded:
        return WorkerEnded(self, "ended with exit code 0")


@pytest.fixture
def inbox(monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerInbox]:
    monkeypatch.setattr(worker_inbox, "_CONFIRM_S", 0.1)
    inbox = WorkerInbox(peer_s=0.2)
    yield inbox
    inbox.close()


@pytest.fixture
def add(inbox: WorkerInbox) -> Iterator[Add]:
    """Add a worker; return it with the worker's end of its channel."""
    channels: list[ControlChannel] = []

    def add(name: str) -> tuple[ChannelWorker, ControlChannel]:
        ours, theirs = (ControlChannel(end, 60.0) for end in socket.socketpair())
        channels.extend((ours, theirs))
        worker = Worker(name, ours)
        inbox.add(worker)
        return worker, theirs

    yield add
    for channel in channels:
        channel.close()


def test_many_workers_need_no_thread(inbox, add) -> None:
    before = threading.active_count()
    ends = dict(add(f"toy-{number}") for number in range(50))
    for worker, end in ends.items():
        end.send("message", message={"name": worker.name})
        end.send("alive")
        end.close()
    events = [inbox.receive() for _ in range(100)]
    assert threading.active_count() == before
    for worker in ends:
        own = [event for event in events if event is not None and event.worker is worker]
        assert own == [
            WorkerMessage(worker, {"name": worker.name}),
            WorkerEnded(worker, "ended with exit code 0"),
        ]


def test_all_that_are_silent_end_at_once_and_say_nothing_afterwards(inbox, add) -> None:
    silent = [add(f"silent-{number}") for number in range(3)]
    (alive, its_end), _unwatched = add("alive"), add("unwatched")
    alive.received_s = time.monotonic() + 3600
    for worker in [*(worker for worker, _ in silent), alive]:
        worker.watch()
    ended = [inbox.receive() for _ in silent]
    assert [event.worker for event in ended if isinstance(event, WorkerEnded) and event.killed] == [
        worker for worker, _ in silent
    ]
    silent[0][1].send("message", message={})
    its_end.send("message", message={"still": "here"})
    assert inbox.receive() == WorkerMessage(alive, {"still": "here"})


def test_what_has_come_while_the_run_did_something_else_is_no_silence(inbox, add) -> None:
    worker, end = add("toy-0")
    worker.watch()
    end.send("message", message={"number": 1})
    time.sleep(0.5)
    assert inbox.receive() == WorkerMessage(worker, {"number": 1})


def test_a_wake_ends_a_wait_in_progress_and_the_next_one(inbox, add) -> None:
    inbox.wake()
    assert inbox.receive() is None
    add("toy-0")
    threading.Timer(0.1, inbox.wake).start()
    assert inbox.receive() is None


def test_a_worker_that_waits_to_be_read_is_read_while_the_run_sends_to_it(inbox, add) -> None:
    """It returns every message, in the thread that reads: neither side's socket holds all of them."""
    worker, end = add("toy-0")

    def echo() -> None:
        for message in end.messages():
            end.send("message", message=message["message"])

    threading.Thread(target=echo, daemon=True).start()
    sent = [{"number": number, "text": "x" * 50_000} for number in range(50)]
    for message in sent:
        worker.send(message)
    assert [inbox.receive() for _ in sent] == [WorkerMessage(worker, message) for message in sent]
