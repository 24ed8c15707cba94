"""The plugin of a third party whose server ``follow`` can start: the tests' server with live traffic."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from spec_core import Draft, Serving, TargetSpec
from spec_core.records import Availability
from spec_engine_hf.engine import HfEngine


class LiveServer(Serving):
    def check_export(self, target: TargetSpec, draft: Draft, folder: Path) -> None: ...

    def availability(self, target: TargetSpec, draft: Draft) -> Availability:
        return Availability(ok=True)

    def command(self, target: TargetSpec, draft: Draft, folder: Path, num_draft_tokens: int) -> str:
        return shlex.join(["python", "-m", "tests.integration.live_server", str(target.folder), str(folder)])

    def live_server_words(self, host: str, port: int) -> Sequence[str] | None:
        return [str(port)]


class EndingServer(LiveServer):
    def command(self, target: TargetSpec, draft: Draft, folder: Path, num_draft_tokens: int) -> str:
        return shlex.join(["python", "-c", "raise MemoryError('no room for the target')"])


class ServingEngine(HfEngine):
    """Engine hf with a program of its own."""

    name: ClassVar[str] = "serving"
    serving: ClassVar[Serving | None] = LiveServer()


class FailingEngine(HfEngine):
    """Its program ends before it serves."""

    name: ClassVar[str] = "failing"
    serving: ClassVar[Serving | None] = EndingServer()
