"""EngineSession: one start of an engine's program, with the capture desk that belongs to it."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from spec_core.errors import EngineError
from spec_core.hosting.capture_desk import CaptureDesk
from spec_core.hosting.modes import CaptureMode
from spec_core.records import Generation
from spec_core.resource import Resource

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from spec_core.engine import EngineContext
    from spec_core.hosting.host_process import EngineSubprocess
    from spec_core.hosting.modes import Mode
    from spec_core.processes.control import Record
    from spec_core.records import AcceptanceCounters, CaptureRequest, SamplingParams

_CONNECTED_S = 10.0
"""The worker connects to the desk before the program is ready; this is for its greeting to be read."""


class EngineSession(Resource):
    """The program runs in one mode, from construction to ``close``."""

    def __init__(
        self,
        mode: Mode,
        context: EngineContext,
        send_timeout_s: float,
        start: Callable[[str | None], EngineSubprocess],
    ) -> None:
        """Begin to start the program: ``start`` gets the desk's address if ``mode`` is a CaptureMode, else None."""
        self.mode = mode
        self._desk: CaptureDesk | None = None
        with ExitStack() as stack:
            if isinstance(mode, CaptureMode):
                self._desk = stack.enter_context(CaptureDesk(context, mode.schema, send_timeout_s))
            self._process = stack.enter_context(start(self._desk.address if self._desk else None))
            self._owned = stack.pop_all()

    def wait_ready(self) -> None:
        self._process.wait_ready()
        if self._desk is not None and not self._desk.wait_connected(_CONNECTED_S):
            raise EngineError(f"{self._process.program} started without {self._process.our_part}")

    def capture(self, requests: Sequence[CaptureRequest]) -> Future[None]:
        """Return a future that is done when all features were handed to their transport."""
        assert self._desk is not None
        desk = self._desk
        keys, captured = desk.expect(requests)

        def ran(run: Future[Record]) -> None:
            """Fail what the program did not run; the worker sends the rest, and tells the desk."""
            if (error := run.exception()) is not None:
                desk.fail(keys, error)

        self._process.prefill(keys, requests).add_done_callback(ran)
        return captured

    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[Generation]:
        try:
            answers = self._process.generate(prompts, sampling)
        except EngineError as error:
            raise self.cause(error) from error
        return [
            Generation(token_ids=tuple(a["ids"])[: sampling.max_new_tokens], top_two_gap=tuple(a["gaps"]))
            for a in answers
        ]

    def acceptance(self) -> AcceptanceCounters:
        """Return what was counted since the program started."""
        return self._process.acceptance()

    def cause(self, error: BaseException) -> BaseException:
        """Return why the program died, if ``error`` is a consequence of that; else ``error``."""
        try:
            self.health()
        except EngineError as failure:
            return failure
        return error

    def health(self) -> None:
        self._process.health()
        if self._desk is None:
            return
        try:
            self._desk.health()
        except EngineError as failure:
            raise (self._process.death() or failure) from None

    def drain(self) -> None:
        """Wait until every capture that was begun has ended."""
        if self._desk is not None:
            self._desk.drain()

    def close(self) -> None:
        self._owned.close()
