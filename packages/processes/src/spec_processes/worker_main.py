"""Run a worker with a control channel: ``python -m spec_processes.worker_main NAME FD PARENT``.

NAME is only shown in the list of processes. The first message on the control channel names the entry.
"""

from __future__ import annotations

import os
import pkgutil
import sys

from spec_core import Message, RunLink, WorkerMain
from spec_core.errors import PeerLost
from spec_processes.control import ControlChannel
from spec_processes.reaper import Reaper
from spec_processes.spawn import channel_to_parent
from spec_processes.stacks import write_stacks_when_asked


class ChannelLink(RunLink):
    """A worker's connection to its run, over the control channel to its launcher."""

    def __init__(self, channel: ControlChannel, address: str) -> None:
        """Store the channel to the launcher's process, and the address of this worker."""
        self.address = address
        self._channel = channel
        self._messages = channel.messages()
        self._ended = False

    def send(self, message: Message) -> None:
        """Send a message to the run (L6)."""
        if self._ended:  # over TCP the first packet after the end raises no error
            raise PeerLost("the run has ended")
        self._channel.send("message", message=message)

    def receive(self) -> Message | None:
        """Wait for the next message of the run and return it; None if the run has ended (L6)."""
        envelope = next(self._messages, None)
        if envelope is None:
            self._ended = True
            return None
        return envelope["message"]


def main() -> None:
    """Call the entry function that the first message on the control channel names."""
    write_stacks_when_asked()
    channel = channel_to_parent(*sys.argv[2:])
    if (first := next(channel.messages(), None)) is None:
        sys.exit(1)
    start: Message = first["message"]
    channel.keep_alive(start["peer_s"])  # before the entry imports anything heavy
    if start["reap"]:
        reaper = Reaper()
        reaper.add(os.getpid())
        reaper.keep_until_exit()
    entry: WorkerMain = pkgutil.resolve_name(start["entry"])
    entry(ChannelLink(channel, start["address"]), start["arguments"])


if __name__ == "__main__":
    main()
