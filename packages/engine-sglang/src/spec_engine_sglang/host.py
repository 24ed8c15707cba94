"""The process that SGLang's Python engine lives in.

That engine's shutdown would kill every child of the process that it is in: here, there are no others.

It is asked to ``run`` a batch of requests (answers: ``read_answer`` of each), and says which files it leaves.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_core.errors import EngineError
from spec_core.hosting.host import answer, give_up
from spec_core.processes.spawn import channel_to_parent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from spec_core.processes.control import ControlChannel, Record


def main() -> int:
    channel = channel_to_parent(*sys.argv[1:])
    records = channel.records()
    order = next(records, None)
    if order is None:
        return 1
    channel.keep_alive(order["peer_s"])
    host = _Host(channel)
    threading.Thread(target=host.obey, args=(records,), daemon=True).start()
    try:
        host.start(order["arguments"])
    except Exception as error:  # noqa: BLE001 (top of a process)
        give_up(channel, error)
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
        self._channel.send("ready", files=self._files)

    def work(self) -> None:
        """For ever; in the main thread, where SGLang puts its signal handlers."""
        self._engine.loop.run_forever()

    def obey(self, records: Iterator[Record]) -> None:
        for record in records:
            work = answer(self._channel, record, self._run(record))
            asyncio.run_coroutine_threadsafe(work, self._engine.loop)
        self.leave()

    def leave(self) -> None:
        """This process, and all that SGLang has started, which is of its group. SGLang itself knows no other end."""
        for file in self._files:
            Path(file).unlink(missing_ok=True)
        sys.stderr.flush()
        os.killpg(0, signal.SIGKILL)

    async def _run(self, record: Record) -> Record:
        """One call for the batch: its requests reach the scheduler in one message, so that they share passes."""
        answers = await self._engine.async_generate(
            input_ids=record["ids"],
            rid=record["names"],
            sampling_params=[dict(record["sampling"]) for _ in record["ids"]],
            **({"return_logprob": True, "top_logprobs_num": 2} if record["gaps"] else {}),
        )
        for refusal in filter(None, (refusal_of(said["meta_info"]) for said in answers)):
            raise EngineError(refusal)
        return {"answers": [read_answer(said) for said in answers]}


def read_answer(said: Record) -> Record:
    """What is kept of SGLang's answer: the new tokens, gaps of the two largest logits, and how many verifications
    accepted 0, 1, … draft tokens. SGLang counts each in full, also one that passes the answer's end."""
    about = said["meta_info"]
    return {
        "ids": said["output_ids"],
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


if __name__ == "__main__":
    sys.exit(main())
