"""Programs of the workers that ``test_worker_main`` starts; they import next to nothing."""

import errno
import os
import sys
import time
from contextlib import ExitStack

from spec_core.errors import ConfigError
from spec_trainer.workers.protocol import Ready, WorkerOrder
from spec_trainer.workers.worker_main import ControllerLink


def obedient(stack: ExitStack, controller: ControllerLink, order: WorkerOrder) -> None:
    controller.send(Ready(address=str(os.getpid())))
    controller.receive()


def failing(stack: ExitStack, controller: ControllerLink, order: WorkerOrder) -> None:
    """Fail with a resource open that takes its time to close."""
    stack.callback(time.sleep, 5)
    raise ValueError("what went wrong\nand where")


def unlogged(stack: ExitStack, controller: ControllerLink, order: WorkerOrder) -> None:
    """Its log is on a full disk, which is what it fails of."""
    os.dup2(os.open("/dev/full", os.O_WRONLY), sys.stderr.fileno())
    raise OSError(errno.ENOSPC, "No space left on device")


def misused(stack: ExitStack, controller: ControllerLink, order: WorkerOrder) -> None:
    raise ConfigError("engine.colour=blue: expected red")
