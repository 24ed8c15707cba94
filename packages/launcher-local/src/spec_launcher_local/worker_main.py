"""Main program of a worker of the local launcher: ``python -m spec_launcher_local.worker_main NAME FD PARENT``.

NAME only shows in the list of processes. The first message on the control channel has the worker's entry and order.
"""

from __future__ import annotations

import pkgutil
import sys
from typing import TYPE_CHECKING

from spec_core import RunLink
from spec_core.processes import channel_to_parent

if TYPE_CHECKING:
    from spec_core import Message, WorkerMain
    from spec_core.processes import ControlChannel


class LocalLink(RunLink):
    """A worker's connection to a run on the same host, over the control channel to its launcher."""

    address = "127.0.0.1"

    def __init__(self, channel: ControlChannel) -> None:
        """Keep the channel to the launcher's process."""
        self._channel = channel
        self._messages = channel.messages()

    def send(self, message: Message) -> None:
        """Send a message to the run (L6)."""
        self._channel.send("message", message=message)

    def receive(self) -> Message | None:
        """Return the next message of the run; None at its end (L6)."""
        envelope = next(self._messages, None)
        return None if envelope is None else envelope["message"]


def main() -> None:
    """Call the entry that the first message names."""
    channel = channel_to_parent(*sys.argv[2:])
    link = LocalLink(channel)
    if (start := link.receive()) is None:
        sys.exit(1)
    channel.keep_alive(start["peer_s"])  # before the entry imports anything heavy
    entry: WorkerMain = pkgutil.resolve_name(start["entry"])
    entry(link, start["order"])


if __name__ == "__main__":
    main()
