"""The plugin of a third party whose server ``follow`` can start: the tests' server with live traffic."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from spec_core import Draft, TargetSpec
from spec_core.records import Availability
from spec_engine_hf.engine import HfEngine


class ServingEngine(HfEngine):
    """Engine hf with a program of its own."""

    name: ClassVar[str] = "serving"

    @classmethod
    def serving(cls, target: TargetSpec, draft: Draft) -> Availability:
        return Availability(ok=True)

    @classmethod
    def serving_command(
        cls, target: TargetSpec, draft: Draft, folder: Path, num_draft_tokens: int
    ) -> str | None:
        return shlex.join(["python", "-m", "tests.integration.live_server", str(target.folder), str(folder)])

    @classmethod
    def live_server_words(cls, host: str, port: int) -> Sequence[str] | None:
        return [str(port)]


class FailingEngine(ServingEngine):
    """Its program ends before it serves."""

    name: ClassVar[str] = "failing"

    @classmethod
    def serving_command(
        cls, target: TargetSpec, draft: Draft, folder: Path, num_draft_tokens: int
    ) -> str | None:
        return shlex.join(["python", "-c", "raise MemoryError('no room for the target')"])
