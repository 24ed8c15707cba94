"""EngineDecoder answers prompts with an engine, and pushes updated draft weights into it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spec_core.errors import RunError
from spec_core.records import SamplingParams
from spec_core.resource import Resource
from spec_trainer.base.stop_request import Interrupted
from spec_trainer.push.servers import open_publisher
from spec_trainer.workers.passes import Pass, decode_warm, warm_up

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from spec_core import Engine
    from spec_kit.weight_sync import Publisher
    from spec_trainer.run.spec import RunParts

log = logging.getLogger(__name__)

_AT_ONCE = 16
"""Number of prompts in a portion; the run can be interrupted between portions. The answers depend on this number."""
_NAME = "engine"


@dataclass(frozen=True, kw_only=True)
class Portion:
    """Prompts that one engine answers together. The answers are the same whichever engine gives them."""

    prompts: list[list[int]]
    seed: int


def portions(prompts: Sequence[Sequence[int]], seed: int) -> Iterator[Portion]:
    """Divide the prompts into portions, in order, and yield the portions."""
    for start in range(0, len(prompts), _AT_ONCE):
        yield Portion(
            prompts=[list(prompt) for prompt in prompts[start : start + _AT_ONCE]], seed=seed + start
        )


def interrupted_decoding() -> Interrupted:
    """Return the exception for a stop before all prompts are answered."""
    return Interrupted("interrupted while prompts were answered; the same command continues there")


class EngineDecoder(Resource):
    """Decodes with a draft. The first draft is loaded; later drafts are pushed into the running engine."""

    def __init__(self, parts: RunParts, engine: Engine) -> None:
        """Prepare to decode with ``engine``, which has no draft yet."""
        self._parts = parts
        self._engine = engine
        self._version: int | None = None
        self._has_drafted = False
        """Whether the engine has answered with a draft; some engines start the draft only with the first answer."""
        self._publisher: Publisher | None = None

    def serve(self, version: int, folder: Path) -> None:
        """Let the engine serve the draft in ``folder`` as ``version``. Raise RunError if it cannot be pushed."""
        if version == self._version:
            return
        if self._has_drafted:
            self._push(version, folder)
        else:
            self._engine.load_draft(folder)
        self._version = version

    def generate(self, portion: Portion) -> Pass:
        """Answer the prompts of a portion with the settings of section ``decode``.

        The first call lets the engine warm up first.
        """
        decode = self._parts.config.decode
        sampling = SamplingParams(
            max_new_tokens=decode.max_new_tokens,
            temperature=decode.temperature,
            top_p=decode.top_p,
            seed=portion.seed,
            num_draft_tokens=self._parts.num_draft_tokens,
            with_margins=False,
        )
        if not self._has_drafted:
            warm_up(self._engine, portion.prompts, sampling)
            self._has_drafted = True
        return decode_warm(self._engine, portion.prompts, sampling)

    def close(self) -> None:
        """Close the connection for weight pushes; the engine stays open."""
        if self._publisher is not None:
            self._publisher.close()

    def _push(self, version: int, folder: Path) -> None:
        from safetensors.torch import load_file

        publisher = self._publisher = self._publisher or self._new_publisher()
        weights = load_file(folder / "model.safetensors")
        report = publisher.publish(version, weights, timeout_s=self._parts.config.push.timeout_s).result()
        outcome = report.replicas[_NAME]
        if not report.committed:
            raise RunError(
                f"the run's engine did not take draft version {version}: {outcome.state}: {outcome.reason}"
            )
        log.info("draft version %d was pushed in %.2f s", version, report.seconds["total"])

    def _new_publisher(self) -> Publisher:
        parts = self._parts
        publisher = open_publisher(parts.backend, parts.config.push, parts.target, parts.backend.device(0))
        publisher.add(_NAME, self._engine.draft_replica()).result()
        return publisher
