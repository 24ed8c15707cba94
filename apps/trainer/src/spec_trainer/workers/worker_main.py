"""This module is the entry point of every worker of a run, with any launcher."""

from __future__ import annotations

import faulthandler
import functools
import logging
import os
import pkgutil
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

from spec_core import LOOPBACK, RunLink
from spec_core.errors import PeerLost, UsageError, first_line
from spec_core.plugin_faults import raised_in
from spec_trainer.workers.protocol import (
    ControlMessage,
    DatasetPart,
    DatasetWanted,
    Failed,
    WorkerOrder,
    from_json,
)

WorkerProgram = Callable[["ExitStack", "ControllerLink", WorkerOrder], None]


class ControllerLink:
    """A worker's connection to the controller: it sends and receives messages over a ``RunLink``."""

    def __init__(self, link: RunLink) -> None:
        """Create the connection; messages are sent and received over ``link``."""
        self._link = link

    @property
    def address(self) -> str:
        """Host name or address at which other workers of the run reach this worker."""
        return self._link.address

    @property
    def address_elsewhere(self) -> str:
        """Address at which workers on other hosts reach this worker; empty if all are on this host."""
        return "" if self.address == LOOPBACK else self.address

    def send(self, message: ControlMessage) -> None:
        """Send a message. Raise PeerLost if the run has ended."""
        self._link.send(message.to_json())

    def receive(self) -> ControlMessage | None:
        """Wait for the next message and return it; None once the run has ended."""
        fields = self._link.receive()
        return None if fields is None else from_json(fields)

    def ask(self, wanted: DatasetWanted) -> DatasetPart:
        """Request a piece of a dataset file; return the reply, which must be the next message."""
        self.send(wanted)
        if not isinstance(answer := self.receive(), DatasetPart):
            raise PeerLost("the run has ended")
        return answer

    def report(self, error: BaseException) -> None:
        """Send the error with which this worker exits, as one line for the user; the log has the traceback."""
        with suppress(PeerLost):
            message = first_line(error) + raised_in(error, "spec_trainer")
            self.send(Failed(type(error).__name__, message, isinstance(error, UsageError)))


def run_worker(link: RunLink, order: Mapping[str, Any]) -> None:
    """Run the function that ``WorkerOrder.program`` names.

    An error is reported before any resource is closed. Closing makes other workers fail, and the user should see the
    first failure.
    """
    faulthandler.enable()
    _leave_signals_to_controller()
    worker = WorkerOrder(**order)
    controller = ControllerLink(link)
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s %(levelname).1s [{worker.name}] %(name)s: %(message)s",
        stream=sys.stderr,
    )
    with ExitStack() as stack:
        try:
            program: WorkerProgram = pkgutil.resolve_name(worker.program)
            if worker.init_order > 0 and controller.receive() is None:
                sys.exit(1)
            program(stack, controller, worker)
        except Exception as error:  # noqa: BLE001 (top of a process)
            with suppress(OSError):  # the log may be on the full disk that this is about
                traceback.print_exc()
            controller.report(error)
            sys.exit(1)


def _leave_signals_to_controller() -> None:
    """Ignore SIGTERM and SIGHUP, which a service manager or batch system may send to every process.

    Only the controller handles them, so that a checkpoint can be saved. The handler does nothing; SIG_IGN is not
    used, because programs that this process starts would inherit it.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # not as nohup has set it
            signal.signal(number, lambda number, frame: None)
            signal.siginterrupt(number, False)
            os.register_at_fork(after_in_child=functools.partial(signal.signal, number, signal.SIG_DFL))
