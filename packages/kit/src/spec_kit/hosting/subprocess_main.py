"""EngineLink connects the process of an engine's program to the EngineSubprocess that has started it.

The module that the process runs connects, starts the program, reports that it is ready, and serves::

    with EngineLink() as link:
        program = Program(**link.arguments)
        link.ready()
        asyncio.run(link.serve({"run": program.run}))
"""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any

from spec_core.errors import DataError, PeerLost
from spec_processes import BEATS_PER_TIMEOUT, channel_to_parent

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping

    from spec_kit.hosting.modes import Fields

    Handler = Callable[[Fields], Awaitable[Mapping[str, Any]]]

_LONGEST = 400
"""Largest number of characters of an error message that is sent."""
_BEAT = -1
"""Key of the task that sends ``alive``; requests have keys from 0 on."""
_SETTLE_S = 1.0
"""Seconds to wait for a better reason than the first exception, such as the death of the program's child."""


class EngineLink(AbstractContextManager["EngineLink"]):
    """The connection to the engine. An exception in its ``with`` block is reported as the program's end."""

    def __init__(self) -> None:
        """Connect to the engine by the last two command-line arguments, and wait for its first message."""
        self._channel = channel_to_parent(*sys.argv[-2:])
        self._messages = self._channel.messages()
        order = next(self._messages, None)
        if order is None:  # the engine was closed at once
            sys.exit(1)
        self.arguments: dict[str, Any] = order["arguments"]
        """The arguments that the EngineSubprocess was constructed with."""
        self.device_type: str = order["device_type"]
        """Torch's type of the devices of the run's backend, such as ``cuda``."""
        self._peer_s: float = order["peer_s"]
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """Key of each request in progress -> the task that answers it."""
        self._failure: BaseException | None = None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        """Report an exception and end the process with code 1."""
        if not isinstance(error, Exception):
            return False
        traceback.print_exception(error)
        self.report(_one_line(error))
        sys.exit(1)

    def ready(self, **fields: Any) -> None:
        """Report that the program accepts requests; ``fields`` become ``EngineSubprocess.ready``.

        The field ``at_once`` is the number of requests that the program answers at once.
        """
        self._channel.send("ready", **fields)

    def report(self, message: str) -> None:
        """Send the engine the reason why the program ends."""
        with suppress(PeerLost):
            self._channel.send("failed", message=message)

    async def serve(
        self,
        handlers: Mapping[str, Handler],
        check: Callable[[], Awaitable[object]] | None = None,
        has_failed: Callable[[], bool] = lambda: False,
    ) -> None:
        """Answer requests until the engine is gone; each request runs as a separate task, which may be cancelled.

        A handler gets the fields of a request and returns the fields of the reply. If it raises DataError, the
        request is refused with a DataError. Any other exception ends ``serve`` if ``has_failed()`` is then true, and
        else refuses the request. ``check`` is awaited before each ``alive`` message; without it, such messages are
        sent as long as the process runs.
        """
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def begin(key: int, work: Coroutine[Any, Any, None]) -> None:
            task = self._tasks[key] = loop.create_task(work)
            task.add_done_callback(lambda task: finished(key, task))

        def cancel(key: int) -> None:
            if (task := self._tasks.get(key)) is not None:
                task.cancel()

        def finished(key: int, task: asyncio.Task[None]) -> None:
            del self._tasks[key]
            if not task.cancelled() and (error := task.exception()) is not None:
                self._failure = self._failure or error
                ended.set()

        def read() -> None:
            for message in self._messages:
                if message["kind"] == "cancel":
                    loop.call_soon_threadsafe(cancel, message["key"])
                else:
                    work = self._answer(message, handlers, has_failed)
                    loop.call_soon_threadsafe(begin, message["key"], work)
            loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=read, name="engine requests", daemon=True).start()
        if check is None:
            self._channel.keep_alive(self._peer_s)
        else:
            begin(_BEAT, self._beat(check))
        await ended.wait()
        for task in list(self._tasks.values()):
            task.cancel()
        if self._failure is not None:
            await asyncio.sleep(_SETTLE_S)
            raise self._failure

    async def _answer(
        self, message: Fields, handlers: Mapping[str, Handler], has_failed: Callable[[], bool]
    ) -> None:
        try:
            kind = "done"
            fields = await handlers[message["kind"]](message)
        except DataError as error:
            kind = "refused"
            fields = {"message": str(error), "is_data": True}
        except Exception as error:  # the engine gets whatever the program raises
            if has_failed():
                raise
            kind = "refused"
            fields = {"message": _one_line(error)}
        with suppress(PeerLost):  # the engine is gone, so nobody waits for the reply
            self._channel.send(kind, key=message["key"], **fields)

    async def _beat(self, check: Callable[[], Awaitable[object]]) -> None:
        with suppress(PeerLost):
            while True:
                await asyncio.sleep(self._peer_s / BEATS_PER_TIMEOUT)
                await check()
                self._channel.send("alive")


def _one_line(error: BaseException) -> str:
    """Return the type and message of an error, or of its cause if it has no message."""
    text = " ".join(str(error).split())[:_LONGEST]
    if not text and error.__cause__ is not None:
        return _one_line(error.__cause__)
    return f"{type(error).__name__}: {text}"
