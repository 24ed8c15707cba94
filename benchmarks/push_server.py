"""The processes of the push benchmark: a stock engine's server as a user starts it, and programs that take lines."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence
    from pathlib import Path

DRAFT_TOKENS = {"eagle3": 3, "dflash": 7, "dspark": 7}
LEAVING_S = 20.0
ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}


def vllm_command(options: argparse.Namespace, draft: str, folder: Path, port: int) -> list[str]:
    """Return ``vllm serve`` with the documented flags.

    It is the module that it runs: the command asks for a distribution called vllm, which a build for CPUs is not.
    """
    speculation = {"method": draft, "model": str(folder), "num_speculative_tokens": DRAFT_TOKENS[draft]}
    flags = {
        "model": options.target,
        "host": "127.0.0.1",
        "port": port,
        "dtype": options.dtype,
        "max-model-len": 512,
        "max-num-seqs": options.streams,
        "speculative-config": json.dumps(speculation),
        "worker-extension-cls": "spec_engine_vllm.worker_extension.WorkerExtension",
        "middleware": "spec_engine_vllm.draft_routes.DraftRoutes",
    }
    on_cpu = {"kv-cache-memory-bytes": 64 << 20}
    flags |= (
        on_cpu if options.backend == "cpu" else {"gpu-memory-utilization": options.gpu_memory_utilization}
    )
    switches = ["--tokens-only", *(["--enforce-eager"] if options.backend == "cpu" else [])]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flag_words(flags), *switches]


def sglang_command(options: argparse.Namespace, draft: str, folder: Path, port: int) -> list[str]:
    """Return SGLang's server, where the secret in its environment is all that pushes need."""
    flags = {
        "model-path": options.target,
        "host": "127.0.0.1",
        "port": port,
        "dtype": options.dtype,
        "context-length": 512,
        "max-running-requests": options.streams,
        "mem-fraction-static": options.gpu_memory_utilization,
        **speculative_flags(draft, folder),
    }
    switches = ["--skip-tokenizer-init", "--skip-server-warmup", "--disable-radix-cache"]
    return [sys.executable, "-m", "sglang.launch_server", *flag_words(flags), *switches]


def speculative_flags(draft: str, folder: Path) -> dict[str, Any]:
    """Return the flags by which SGLang serves a draft, without their dashes."""
    return {
        "speculative-algorithm": draft.upper(),
        "speculative-draft-model-path": folder,
        "speculative-num-steps": DRAFT_TOKENS[draft] if draft == "eagle3" else 1,
        "speculative-eagle-topk": 1,
        "speculative-num-draft-tokens": DRAFT_TOKENS[draft] + 1,
    }


SERVERS = {"vllm": vllm_command, "sglang": sglang_command}


@contextmanager
def serving(
    options: argparse.Namespace, draft: str, folder: Path, devices: Sequence[int] = (0,)
) -> Iterator[str]:
    """Yield the address of a server with that draft, on these devices."""
    port = free_port()
    command = [*SERVERS[options.server](options, draft, folder, port), *options.words]
    file = options.output / f"{draft}-server-{devices[0]}.log"
    with program(command, file, on_device(*devices) | ENVIRONMENT, answers=False) as server:
        yield ready(server, port, file, options.limit_s)


def free_port() -> int:
    """Return a port that no program of this host uses."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def ready(server: Program, port: int, log: Path, limit_s: float) -> str:
    """Return the address of a server once it answers."""
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + limit_s
    while not _is_ready(url):
        server.check()
        if time.monotonic() > deadline:
            raise SystemExit(f"the server was not ready within {limit_s:.0f} s; see {log}")
        time.sleep(0.5)
    return url


def on_device(*numbers: int) -> dict[str, str]:
    """Return the variable that leaves a process these of the devices."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(number) for number in range(max(numbers) + 1)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[number] for number in numbers)}


def flag_words(flags: dict[str, Any]) -> list[str]:
    """Return flags as the words of a command line."""
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def _is_ready(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
        return answer.status == 200
    return False


class Program:
    """A process of its own that takes lines of JSON and answers each."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        """Talk to ``process``, whose standard error is in ``log``."""
        self._process, self._log = process, log

    def ask(self, **command: Any) -> Any:
        """Return the answer to a command."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.check()
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        if not (line := self._process.stdout.readline()):
            self._process.wait(LEAVING_S)
            self.check()
        return json.loads(line)

    def finish(self, limit_s: float) -> Any:
        """End its input and return what it prints then."""
        output, _ = self._process.communicate(timeout=limit_s)
        self.check(allow=0)
        return json.loads(output)

    def check(self, allow: int | None = None) -> None:
        """End the benchmark where the process has ended."""
        if (code := self._process.poll()) not in (None, allow):
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-40:])
            raise SystemExit(f"{tail}\n==> {self._log}: a process ended with exit code {code}")


@contextmanager
def program(
    command: Sequence[str],
    log: Path,
    env: dict[str, str] | None = None,
    *,
    answers: bool = True,
    leaving_s: float = LEAVING_S,
) -> Iterator[Program]:
    """Yield a process; it and what it has started end with the block. It prints ``answers``, or into the log."""
    with log.open("w") as stderr:
        process = subprocess.Popen(
            command,
            env=os.environ | (env or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if answers else stderr,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )
    try:
        yield Program(process, log)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(leaving_s)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
