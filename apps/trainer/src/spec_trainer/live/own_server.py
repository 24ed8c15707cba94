"""OwnServer is the server that ``spec-trainer follow`` starts itself, with ``follow.serve.engine``."""

from __future__ import annotations

import logging
import os
import shlex
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from spec_core import Engine, foreign_errors
from spec_core.errors import ConfigError, EngineError, PluginError, ProtocolError, RunError
from spec_core.foreign import cause
from spec_core.plugins import find, load
from spec_core.resource import Resource
from spec_kit.hosting.program_log import logged_errors
from spec_kit.live_traffic import LIVE_REQUESTS_VARIABLE, LiveRequestsConfig
from spec_processes import SAFE_PATH, Reaper, end_group, ending
from spec_processes.sockets.addresses import bind, format_address, parse_address
from spec_trainer.base.stop_request import Interrupted
from spec_trainer.push.servers import ask_servers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spec_trainer.base.stop_request import StopRequest
    from spec_trainer.configuration.run import AnyRunConfig
    from spec_trainer.run.spec import RunParts, RunSpec

log = logging.getLogger(__name__)

_SHARE = 0.1
"""Share of its requests that the server stores, unless the user sets ``SPEC_LIVE_REQUESTS``."""
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Address of all interfaces -> the address by which this host reaches a server that listens there."""
_ANSWER_S = 5.0
_PAUSE_S = 0.25
_GRACE_S = 20.0
"""Seconds between SIGTERM, at which the server answers its last requests, and SIGKILL."""
_COUNTED_S = 24 * 60 * 60.0
"""Period in which restarts are counted, as replacements of engines are."""
_TAIL_BYTES = 1 << 18


def url_of(config: AnyRunConfig) -> str:
    """Return the address at which the command reaches its own server. Raise ConfigError if it is malformed."""
    host, port = _address(config)
    return f"http://{format_address(_EVERYWHERE.get(host, host), port)}"


def check_own_server(parts: RunParts) -> None:
    """Raise ConfigError if the engine that the user named cannot start here as a server for the draft."""
    _check_free(parts.config)
    _arguments(parts.config)
    _live_requests(parts.config)
    name = str(parts.config.follow.serve.engine)
    serving = load(Engine, name).serving
    with foreign_errors(
        PluginError, f"engine {name!r} ({find(Engine, name).owner}) fails to say what it serves"
    ):
        if serving is None or serving.live_server_words(*_address(parts.config)) is None:
            raise ConfigError(
                f"follow.serve.engine={name}: this engine has no server that follow can start; start a server "
                "yourself and give its address by --server"
            )
        found = serving.availability(parts.target, parts.draft)
    if not found.ok:
        raise ConfigError(f"follow.serve.engine={name}: {found.reason}")


class OwnServer(Resource):
    """The server's processes, from the first ``keep`` to ``close``.

    They are one process group, which is killed if this process ends, even by ``kill -9``.
    """

    def __init__(self, spec: RunSpec, stop: StopRequest) -> None:
        """Start nothing; a ``stop`` interrupts the wait for the server's first answer."""
        self._spec = spec
        self._stop = stop
        self._config = spec.config.follow.serve
        self._log = spec.directory.logs / "server.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._restarts: deque[float] = deque()
        """Times (``time.monotonic``) of the restarts within the last day."""
        self._reaper = Reaper()

    def keep(self, draft: Path) -> None:
        """If the server does not run, start it with the draft in the folder ``draft``.

        The first call waits until the server answers; later calls do not wait. Raise RunError if the server does
        not start, or ends more often than ``engine.replacements`` allows.
        """
        if self._process is None:
            self._process = self._start(draft)
            self._await_answer(self._process)
        elif (code := self._process.poll()) is not None:
            problem = f"the server of follow.serve {ending(code)}{self._reason()}"
            self._end(self._process)
            self._process = None
            self._count(problem)
            log.warning("%s; it is started again", problem)
            self._process = self._start(draft)

    def close(self) -> None:
        """End the server: ask it to finish its requests, then kill what is left of its processes."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                log.warning(
                    "the server of follow.serve is killed, because it has not ended in %.0f s", _GRACE_S
                )
            self._end(self._process)
            self._process = None
        self._reaper.close()

    def _start(self, draft: Path) -> subprocess.Popen[bytes]:
        _check_free(self._spec.config)
        words = self._words(draft)
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        env = {
            **os.environ,
            **SAFE_PATH,
            "PATH": path,
            LIVE_REQUESTS_VARIABLE: _live_requests(self._spec.config),
        }
        log.info("starting the server at %s: %s", self._config.address, shlex.join(words))
        try:
            with self._log.open("wb") as output:
                process = subprocess.Popen(
                    words,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            raise RunError(f"the server of follow.serve cannot be started: {cause(error)}") from error
        self._reaper.add(process.pid)
        return process

    def _words(self, draft: Path) -> Sequence[str]:
        spec = self._spec
        name = str(self._config.engine)
        serving = load(Engine, name).serving
        assert serving is not None, "check_own_server accepts no such engine"
        failure = f"engine {name!r} ({find(Engine, name).owner}) fails to name its serving command"
        with foreign_errors(PluginError, failure):
            command = serving.command(spec.target, spec.draft, draft, spec.num_draft_tokens)
            further = serving.live_server_words(*_address(spec.config)) or ()
        return [*shlex.split(command), *further, *_arguments(spec.config)]

    def _await_answer(self, process: subprocess.Popen[bytes]) -> None:
        url = url_of(self._spec.config)
        deadline = time.monotonic() + self._config.start_s
        while True:
            if self._stop.requested:
                raise Interrupted("interrupted before the server answered; the same command starts it again")
            if (code := process.poll()) is not None:
                raise RunError(
                    f"the server of follow.serve {ending(code)} before it answered{self._reason()}"
                )
            answer = ask_servers([url], _ANSWER_S)[url]
            if not isinstance(answer, EngineError):
                answer.close()
                log.info("the server at %s answers", url)
                return
            if time.monotonic() >= deadline:
                raise RunError(
                    f"the server of follow.serve did not answer within follow.serve.start_s={self._config.start_s:g} "
                    f"({answer}){self._reason()}"
                )
            time.sleep(_PAUSE_S)

    def _count(self, problem: str) -> None:
        """Count a restart. Raise RunError if ``engine.replacements`` allows no other one."""
        now = time.monotonic()
        limit = self._spec.config.engine.replacements
        self._restarts.append(now)
        while self._restarts[0] < now - _COUNTED_S:
            self._restarts.popleft()
        if len(self._restarts) > limit:
            raise RunError(f"{problem}; engine.replacements={limit} allows no other start in a day")

    def _reason(self) -> str:
        """Return the last errors in the server's log, and the log's path, as the end of a sentence.

        There are two at most: the last error of a program of several processes often only says that a process failed.
        """
        with self._log.open("rb") as file:
            file.seek(max(0, self._log.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        errors = list(dict.fromkeys(logged_errors(lines)))[-2:]
        return f"{': ' if errors else ''}{'; '.join(errors)}; see {self._log}"

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        end_group(process.pid)
        process.wait()
        self._reaper.remove(process.pid)


def _address(config: AnyRunConfig) -> tuple[str, int]:
    address = config.follow.serve.address
    try:
        host, port = parse_address(address)
    except ProtocolError as error:
        raise ConfigError(f"follow.serve.address: {error}") from error
    if not port:
        raise ConfigError(
            f"follow.serve.address={address!r}: clients need to know the port; give one above 0"
        )
    return host, port


def _arguments(config: AnyRunConfig) -> list[str]:
    arguments = config.follow.serve.arguments
    try:
        return shlex.split(arguments)
    except ValueError as error:
        raise ConfigError(
            f"follow.serve.arguments={arguments!r}: {cause(error)}; expected words of a shell"
        ) from error


def _check_free(config: AnyRunConfig) -> None:
    """Raise ConfigError if another program listens at the address, or the address is not of this host."""
    try:
        bind(*_address(config)).close()
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"follow.serve.address={config.follow.serve.address!r}: {cause(error)}; give host:port of this host, "
            "with a free port"
        ) from error


def _live_requests(config: AnyRunConfig) -> str:
    """Return what the server stores, as JSON: the user's ``SPEC_LIVE_REQUESTS``, or a share of the requests."""
    if LiveRequestsConfig.from_environment() is not None:
        return os.environ[LIVE_REQUESTS_VARIABLE]
    states = config.follow.states_bytes if config.follow.capture == "serving" else 0
    return LiveRequestsConfig(share=_SHARE, states_bytes=states).model_dump_json(exclude_defaults=True)
