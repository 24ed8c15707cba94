"""SglangEngine: the target run by stock SGLang, in processes of its own."""

from __future__ import annotations

import logging
import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, ClassVar, Self, cast

from spec_core.engine import Engine
from spec_core.errors import EngineError
from spec_core.records import Generation
from spec_trainer.engines.serving_formats import check_for_sglang
from spec_trainer.engines.sglang import hook
from spec_trainer.engines.sglang.config import SglangConfig
from spec_trainer.engines.sglang.modes import ENVIRONMENT, Capturing, Drafting, Plain, server_arguments
from spec_trainer.engines.sglang.request_names import name_of
from spec_trainer.engines.sglang.speculation import check_speculation
from spec_trainer.engines.sglang.tally import Tally
from spec_trainer.engines.sglang.versions import availability

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from spec_core.config import EngineConfig
    from spec_core.engine import Site
    from spec_core.records import (
        AcceptanceCounters,
        Availability,
        CaptureRequest,
        FeatureSchema,
        SamplingParams,
    )
    from spec_core.target import TargetSpec
    from spec_core.transport import Transport
    from spec_trainer.engines.capture_desk import CaptureDesk
    from spec_trainer.engines.sglang.modes import Mode
    from spec_trainer.engines.sglang.server import SglangServer

log = logging.getLogger(__name__)

_CONNECTED_S = 10.0
"""The hook connects before SGLang is ready; this is for its greeting to be read."""


class SglangEngine(Engine):
    """SGLang starts when the first call says what for, and anew when a later one wants another mode: that takes a
    minute or two each time. ``capture`` of no requests starts it without doing anything more.

    One thread starts SGLang and hands requests to it, in call order; captures overlap.
    """

    name: ClassVar[str] = "sglang"
    api_version: ClassVar[int] = 1
    Config: ClassVar[type[EngineConfig]] = SglangConfig
    in_process: ClassVar[bool] = False

    @classmethod
    def probe(cls) -> Availability:
        return availability()

    @classmethod
    def at(
        cls, config: EngineConfig, target: TargetSpec, site: Site, transport: Transport | None = None
    ) -> Self:
        """``transport`` is not used: SGLang's own process builds one from ``site`` (E7)."""
        return cls(config, target, site)

    def __init__(self, config: EngineConfig, target: TargetSpec, site: Site) -> None:
        import torch

        super().__init__(config, target, torch.device("cpu"))  # this process computes nothing
        self._config = cast("SglangConfig", config)
        self._site = site
        self._mode: Mode | None = None
        self._server: SglangServer | None = None
        self._desk: CaptureDesk | None = None
        self._draft: Path | None = None
        self._tally = Tally()
        self._captures: set[Future[None]] = set()
        self._moved_s = time.monotonic()
        self._closed = False
        self._lock = threading.Lock()
        self._control = ThreadPoolExecutor(1, thread_name_prefix="sglang-engine")

    @classmethod
    def check_draft(
        cls, config: EngineConfig, target: TargetSpec, folder: Path, num_draft_tokens: int
    ) -> None:
        check_for_sglang(folder, target)
        check_speculation(folder, num_draft_tokens)

    def capture(self, requests: Sequence[CaptureRequest], schema: FeatureSchema) -> Future[None]:
        done: Future[None] = Future()

        def started(start: Future[list[Future[None]]]) -> None:
            if start.cancelled():
                done.set_exception(EngineError("the engine was closed"))
            elif error := start.exception():
                done.set_exception(error)
            else:
                _when_all(start.result(), done, self._cause)

        self._check_open()
        self._control.submit(self._start_capture, list(requests), schema).add_done_callback(started)
        return done

    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[Generation]:
        """Several prompts run at once. ``sampling.seed`` has no effect: SGLang seeds itself at its start.
        ``max_new_tokens=0`` only prefills."""
        self._check_open()
        return self._control.submit(self._generate, [list(p) for p in prompts], sampling).result()

    def load_draft(self, folder: Path) -> None:
        from spec_trainer.engines.draft_folder import recognise

        recognise(folder).check_target(self.target)
        check_for_sglang(folder, self.target)
        check_speculation(folder)
        self._draft = folder
        self._tally = Tally()
        # The same folder may hold other weights by now.
        if isinstance(self._mode, Drafting):
            self._check_open()
            self._control.submit(self._stop).result()

    def acceptance(self) -> AcceptanceCounters:
        return self._tally.counters()

    def health(self) -> None:
        self._check_open()
        server, desk = self._server, self._desk
        if server is not None:
            server.health()
        if desk is not None and desk.connected:
            desk.health()
        if self._captures and time.monotonic() - self._moved_s > 2 * self._config.send_timeout_s:
            raise EngineError(
                "SGLang has captured nothing for twice engine.send_timeout_s: its hook is not called"
            )

    def close(self) -> None:
        with self._lock:
            self._closed = True
            server = self._server
        if server is not None:
            server.close()  # wakes a start or a generate that waits for it
        self._control.shutdown(wait=True, cancel_futures=True)
        self._stop()

    def _start_capture(self, requests: list[CaptureRequest], schema: FeatureSchema) -> list[Future[None]]:
        for request in requests:
            self._check_ids(request.input_ids, 0)
        server = self._serving(Capturing(schema))
        if not requests:
            return []
        assert self._desk is not None
        desk, expected = self._desk, self._desk.expect(requests)
        keys = [key for key, _ in expected]
        captures = [done for _, done in expected]
        self._moved_s = time.monotonic()
        for capture in captures:
            self._captures.add(capture)
            capture.add_done_callback(self._captured)

        def answered(answers: Future[object]) -> None:
            if error := answers.exception():
                for key in keys:
                    desk.fail(key, error)

        names = [name_of(key, len(r.input_ids)) for key, r in zip(keys, requests, strict=True)]
        run = server.run(names, [r.input_ids for r in requests], {"max_new_tokens": 0, "temperature": 0.0})
        run.add_done_callback(answered)
        return captures

    def _cause(self, error: BaseException) -> BaseException:
        """The death of SGLang where that is what ``error`` comes of."""
        server, desk = self._server, self._desk
        try:
            if server is not None and desk is not None:
                server.health()
                desk.health()
        except EngineError as failure:
            return (server.death() if server else None) or failure
        return error

    def _captured(self, capture: Future[None]) -> None:
        self._captures.discard(capture)
        self._moved_s = time.monotonic()

    def _generate(self, prompts: list[list[int]], sampling: SamplingParams) -> list[Generation]:
        for prompt in prompts:
            self._check_ids(prompt, sampling.max_new_tokens + sampling.num_draft_tokens)
        mode = self._decoding_mode(sampling)
        server = self._serving(mode)
        if not prompts:
            return []
        wanted = self._config.gaps and sampling.with_gaps
        gaps = wanted and isinstance(mode, Plain) and sampling.temperature == 0
        names = [f"spec-generate-{index}-{time.monotonic_ns()}" for index in range(len(prompts))]
        answers = server.run(names, prompts, self._sampling(sampling), gaps=gaps).result()
        if isinstance(mode, Drafting):
            for answer in answers:
                self._tally.add(answer.accepted, mode.num_draft_tokens)
        return [Generation(token_ids=a.ids[: sampling.max_new_tokens], top_two_gap=a.gaps) for a in answers]

    def _decoding_mode(self, sampling: SamplingParams) -> Mode:
        if sampling.num_draft_tokens == 0:
            return Plain()
        if self._draft is None:
            raise EngineError(f"{sampling.num_draft_tokens} draft tokens are wanted, but no draft is loaded")
        check_speculation(self._draft, sampling.num_draft_tokens)
        return Drafting(self._draft, sampling.num_draft_tokens)

    def _sampling(self, sampling: SamplingParams) -> dict[str, object]:
        return {
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "ignore_eos": not sampling.stop_at_eos,
            "stop_token_ids": list(self.target.eos_token_ids),
        }

    def _serving(self, mode: Mode) -> SglangServer:
        """The server in ``mode``; started, and another one ended first, where that is needed."""
        if self._server is not None and mode == self._mode:
            self._server.health()
            return self._server
        wait(list(self._captures))
        self._stop()
        try:
            return self._start(mode)
        except BaseException:
            self._stop()
            raise

    def _start(self, mode: Mode) -> SglangServer:
        from spec_trainer.engines.capture_desk import CaptureDesk
        from spec_trainer.engines.sglang.server import SglangServer

        env = dict(ENVIRONMENT)
        if isinstance(mode, Capturing):
            self._check_schema(mode.schema)
            self._desk = CaptureDesk(self._site, mode.schema, self._config.send_timeout_s)
            env |= hook.environment(self._desk.address, self.target.norm_name.split(".")[-2], os.environ)
        arguments = server_arguments(self._config, self.target, self._site.memory_fraction, mode)
        log.info("starting SGLang: %s", arguments)
        start_s = time.monotonic()
        with self._lock:
            self._check_open()
            server = self._server = SglangServer(arguments, env, self._site)
        server.wait_ready()
        if self._desk is not None and not _becomes_true(lambda: cast("CaptureDesk", self._desk).connected):
            raise EngineError(
                f"SGLang started without the plugin {hook.PLUGIN!r} (entry-point group 'sglang.srt.plugins' of "
                f"spec-trainer); its log says which plugins it found"
            )
        log.info("SGLang is up after %.0f s", time.monotonic() - start_s)
        self._mode = mode
        return server

    def _stop(self) -> None:
        server, desk = self._server, self._desk
        self._server = self._desk = self._mode = None
        if server is not None:
            server.close()
        if desk is not None:
            desk.close()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the sglang engine is closed")

    def _check_ids(self, ids: Sequence[int], num_more: int) -> None:
        """On a device, a token or a position that does not exist would end SGLang, not the request."""
        target = self.target
        if not ids or len(ids) + num_more > target.max_positions:
            raise EngineError(
                f"a prompt of {len(ids)} tokens with {num_more} more does not fit target {target.folder} (1 to "
                f"{target.max_positions} positions)"
            )
        if min(ids) < 0 or max(ids) >= target.vocab_size:
            raise EngineError(f"a prompt has tokens outside the target's vocabulary of {target.vocab_size}")

    def _check_schema(self, schema: FeatureSchema) -> None:
        target = self.target
        if self._site.placement is None:
            raise EngineError("this engine was built without a placement: it can generate, not capture")
        if schema.hidden_size != target.hidden_size or schema.layers[-1] > target.num_layers:
            raise EngineError(
                f"schema {schema} does not fit target {target.folder}: {target.num_layers} layers of width "
                f"{target.hidden_size}"
            )


def _when_all(
    parts: list[Future[None]], done: Future[None], cause: Callable[[BaseException], BaseException]
) -> None:
    """Finishes ``done`` when every part is; with the ``cause`` of the first part's error, if any has one."""
    lock, left = threading.Lock(), len(parts)

    def finished(part: Future[None]) -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            finish()

    def finish() -> None:
        errors = [error for part in parts if (error := part.exception()) is not None]
        if errors:
            done.set_exception(cause(errors[0]))
        else:
            done.set_result(None)

    for part in parts:
        part.add_done_callback(finished)
    if not parts:
        finish()


def _becomes_true(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + _CONNECTED_S
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
