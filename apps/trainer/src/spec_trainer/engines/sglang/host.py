"""The process that SGLang's Python engine lives in: ``python -m spec_trainer.engines.sglang.host FD PARENT``.

A process of its own because that engine takes over the one that it is in (signal handlers, event loop policy, start
method, environment), and its shutdown kills every child of that process.

Records from ``SglangServer``: the order (``arguments``), then ``run`` (a batch of requests). To it: ``alive``,
``ready``, ``answers``, ``refused``, ``failed``.
"""

from __future__ import annotations

import functools
import os
import re
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_core.config import first_line
from spec_core.errors import PeerLost
from spec_trainer.launch.child import die_with
from spec_trainer.launch.control import ControlChannel

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterator

    from spec_trainer.launch.control import Record

_HEARTBEATS_PER_TIMEOUT = 8


def main() -> int:
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    die_with(parent)
    os.set_inheritable(descriptor, False)
    channel = ControlChannel(socket.socket(fileno=descriptor))
    records = channel.records()
    order = next(records, None)
    if order is None:
        return 1
    threading.Thread(target=_beat, args=(channel, order["peer_s"]), daemon=True).start()
    host = _Host(channel)
    threading.Thread(target=host.obey, args=(records,), daemon=True).start()
    try:
        host.start(order["arguments"])
    except Exception as error:  # noqa: BLE001 (top of a process)
        traceback.print_exc()
        channel.report(error)
        host.leave()
    host.work()
    return 0


class _Host:
    def __init__(self, channel: ControlChannel) -> None:
        self._channel = channel
        self._engine: Any = None
        self._files: list[str] = []

    def start(self, arguments: dict[str, Any]) -> None:
        """Blocks until the target is loaded."""
        import sglang

        self._engine = sglang.Engine(**arguments)
        self._files = files_of(self._engine.port_args)
        self._channel.send("ready", version=sglang.__version__, files=self._files)

    def work(self) -> None:
        """For ever; in the main thread, where SGLang puts its signal handlers."""
        self._engine.loop.run_forever()

    def obey(self, records: Iterator[Record]) -> None:
        for record in records:
            self._engine.loop.call_soon_threadsafe(self._run, record)
        self.leave()

    def leave(self) -> None:
        """This process, and all that SGLang has started, which is of its group. SGLang itself knows no other end."""
        for file in self._files:
            Path(file).unlink(missing_ok=True)
        sys.stderr.flush()
        os.killpg(0, signal.SIGKILL)

    def _run(self, record: Record) -> None:
        """One call for the batch: its requests reach the scheduler in one message, so that they share passes."""
        answers = self._engine.async_generate(
            input_ids=record["ids"],
            rid=record["names"],
            sampling_params=[dict(record["sampling"]) for _ in record["ids"]],
            **({"return_logprob": True, "top_logprobs_num": 2} if record["gaps"] else {}),
        )
        task = self._engine.loop.create_task(answers)
        task.add_done_callback(functools.partial(self._report, record["batch"]))

    def _report(self, batch: int, task: asyncio.Task[list[Record]]) -> None:
        with suppress(PeerLost):  # nobody is left to be told
            if (error := task.exception()) is not None:
                message = f"{type(error).__name__}: {first_line(error)}"
                self._channel.send("refused", batch=batch, message=message)
                return
            refusals = [text for answer in task.result() if (text := refusal_of(answer["meta_info"]))]
            if refusals:
                self._channel.send("refused", batch=batch, message=refusals[0])
            else:
                self._channel.send("answers", batch=batch, answers=[read_answer(a) for a in task.result()])


def read_answer(answer: Record) -> Record:
    """What is kept of SGLang's answer: the new tokens, gaps of the two largest logits, and how many verifications
    accepted 0, 1, … draft tokens. SGLang counts each in full, also one that passes the answer's end."""
    about = answer["meta_info"]
    return {
        "ids": answer["output_ids"],
        "gaps": [top[0][0] - top[1][0] for top in about.get("output_top_logprobs") or ()],
        "accepted": about.get("spec_correct_drafts_histogram") or [],
    }


def refusal_of(about: Record) -> str | None:
    """Why SGLang gave a request up, if it did."""
    reason = about.get("finish_reason") or {}
    return reason.get("message") or "aborted" if reason.get("type") == "abort" else None


def files_of(port_args: Any) -> list[str]:
    """Files that SGLang makes at its start and leaves behind: ends of its sockets, a board in shared memory."""
    ends = re.findall(r"ipc://([^'\"\s,)]+)", repr(port_args))
    instance = getattr(port_args, "instance_id", "")
    boards = Path("/dev/shm").glob(f"sglang_*{instance}*") if instance else ()
    return [*ends, *(str(board) for board in boards)]


def _beat(channel: ControlChannel, peer_s: float) -> None:
    pause = threading.Event()
    with suppress(PeerLost):
        while not pause.wait(peer_s / _HEARTBEATS_PER_TIMEOUT):
            channel.send("alive")


if __name__ == "__main__":
    sys.exit(main())
