"""Forks the frontends of vLLM and SGLang from processes that have imported them: each anew takes 6 to 12 CPU seconds.

The forked process is this process's child, as one that it had started: it becomes an orphan at once, and for this
moment this process adopts orphans.
"""

import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import IO

from spec_engine_vllm.arguments import DEFAULT_ENVIRONMENT

_NEEDED = {
    "spec_engine_vllm.subprocess_main": (
        "spec_engine_vllm.vllm_ranks", "spec_engine_vllm.image_prompts", "vllm.v1.engine.async_llm",
        "vllm.v1.engine.core", "vllm.v1.executor.uniproc_executor", "vllm.v1.worker.cpu_worker",
    ),
    "spec_engine_sglang.subprocess_main": (
        "spec_engine_sglang.sglang_ranks", "sglang.srt.entrypoints.engine", "sglang.srt.models.registry",
    ),
}  # fmt: skip
"""The modules that a program imports."""
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_LONGEST = 1 << 20
"""Most bytes of a request: an environment."""


class Forked(subprocess.Popen[bytes]):
    """A handle of a process that another one has forked; its output is piped to ``stdout``."""

    def __init__(self, program: str, pid: int, stdout: IO[bytes]) -> None:
        # What Popen's other methods read.
        self.args, self.pid, self.returncode = [program], pid, None
        self.stdin, self.stdout, self.stderr = None, stdout, None
        self._child_created, self._waitpid_lock = True, threading.Lock()
        self._input, self._communication_started = None, False


class ForkServer:
    """A process that has imported what ``program`` needs, has no thread and forks when it is asked."""

    def __init__(self, program: str) -> None:
        self._program = program
        self._asking, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, program, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=DEFAULT_ENVIRONMENT | os.environ,
            )

    def start(self, end: socket.socket, env: Mapping[str, str]) -> Forked:
        """Start the program; ``end`` is its end of its control channel."""
        wanted = {"env": dict(env), "parent": os.getpid()}
        reading, writing = os.pipe()
        with self._lock, _adopting(), os.fdopen(writing, "wb") as output:
            socket.send_fds(self._asking, [json.dumps(wanted).encode()], [end.fileno(), output.fileno()])
            answer = self._asking.recv(16)
        assert answer, "the process that forks has ended"
        return Forked(self._program, int(answer), os.fdopen(reading, "rb"))

    def close(self) -> None:
        self._asking.close()
        self._process.wait()


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _prctl(_PR_SET_CHILD_SUBREAPER, 0)


def _prctl(option: int, value: int) -> None:
    assert ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) == 0


@contextlib.contextmanager
def forked_starts() -> Iterator[None]:
    """Fork the frontends that this process starts while SPEC_TEST_FORKS is in their environment."""
    spawning = importlib.import_module("spec_processes.spawn")
    plain = spawning.spawn_on
    with contextlib.ExitStack() as closing:
        fork_server = functools.cache(
            lambda program: closing.enter_context(contextlib.closing(ForkServer(program)))
        )

        def spawn_on(end, words, env, output):
            if words[0] not in _NEEDED or "SPEC_TEST_FORKS" not in env:
                return plain(end, words, env, output)
            assert output == subprocess.PIPE
            return fork_server(words[0]).start(end, env)

        spawning.spawn_on = spawn_on
        closing.callback(setattr, spawning, "spawn_on", plain)
        yield


def main(program: str, asked: socket.socket) -> None:
    for name in _NEEDED[program]:
        importlib.import_module(name)
    gc.freeze()
    while True:
        request, descriptors, _, _ = socket.recv_fds(asked, _LONGEST, 2)
        if not request:
            return
        between = os.fork()
        if between == 0:
            _fork_again(program, asked, json.loads(request), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        os.waitpid(between, 0)


def _fork_again(program: str, asked: socket.socket, wanted: dict, descriptors: list[int]) -> None:
    """End this process, and so make its child the asking process's."""
    between = os.getpid()
    if os.fork() > 0:
        os._exit(0)
    while os.getppid() == between:
        time.sleep(0.001)
    os.setsid()
    with asked:
        asked.send(str(os.getpid()).encode())
    _run(program, wanted, *descriptors)


def _run(program: str, wanted: dict, end: int, output: int) -> None:
    """Run the program as ``python -m`` does; the end of its channel has another number here."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.close(output)
    os.environ.clear()
    os.environ.update(wanted["env"])
    sys.argv = [program, str(end), str(wanted["parent"])]
    runpy.run_module(program, run_name="__main__", alter_sys=True)
    sys.exit()


if __name__ == "__main__":
    main(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))
