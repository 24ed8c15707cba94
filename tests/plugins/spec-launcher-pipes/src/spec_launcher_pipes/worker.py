"""Main program of a worker: ``python -m spec_launcher_pipes.worker NAME``."""

from __future__ import annotations

import json
import os
import pkgutil
import queue
import sys
import threading
from typing import TYPE_CHECKING

from spec_core import RunLink
from spec_core.errors import PeerLost

if TYPE_CHECKING:
    from spec_core import Message


class PipeLink(RunLink):
    """A worker's connection to its run."""

    address = "127.0.0.1"

    def __init__(self) -> None:
        self._in, self._out = os.fdopen(os.dup(0), "rb"), os.dup(1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)  # L9: what the worker prints goes into its log
        self._arrived: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._sending = threading.Lock()
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, message: Message | None) -> None:
        """L6: refuse once the launcher has closed the pipe."""
        line = json.dumps(message).encode() + b"\n"
        if self._ended.is_set():
            raise PeerLost("the launcher has closed the pipe")
        with self._sending:
            while line:
                line = line[os.write(self._out, line) :]

    def receive(self) -> Message | None:
        """L6: None at the end of the pipe, and ever after."""
        return None if self._ended.is_set() and self._arrived.empty() else self._arrived.get()

    def beat(self, pause_s: float) -> None:
        """L4: send a heartbeat regularly."""
        while not self._ended.wait(pause_s):
            self.send(None)

    def _read(self) -> None:
        for line in self._in:
            self._arrived.put(json.loads(line))
        self._ended.set()
        self._arrived.put(None)


def main() -> None:
    """Call the entry that the first message names."""
    link = PipeLink()
    if (start := link.receive()) is None:
        sys.exit(1)
    threading.Thread(target=link.beat, args=(start["beat_s"],), daemon=True).start()
    pkgutil.resolve_name(start["entry"])(link, start["arguments"])


if __name__ == "__main__":
    main()
