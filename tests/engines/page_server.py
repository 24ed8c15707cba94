"""A server started by the command of docs/weight-sync.md, and the page's own push to it."""

import http.client
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from ..free_port import free_port

PAGE = Path(__file__).parents[2] / "docs" / "weight-sync.md"
LIMIT_S = 120.0


def shell_block(part: str) -> str:
    """Return the page's one shell block in which ``part`` stands."""
    (block,) = [
        block for block in re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL) if part in block
    ]
    return block.strip()


class ServerProcess:
    """A server that a shell command starts, with all of its processes."""

    def __init__(self, command: str, folder: Path, port: int) -> None:
        """Start ``command`` in ``folder``; it listens on ``port`` of this host."""
        self.port = port
        self._folder = folder
        self._env = os.environ | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
        self._env.pop("SPEC_TEST_FORKS", None)  # it starts its processes as a user's does
        self.log = folder / "server.log"
        with self.log.open("w") as output:
            self._process = subprocess.Popen(
                ["bash", "-euc", command],
                env=self._env,
                cwd=folder,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_ready(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while True:
            with suppress(OSError):
                if self.ask("GET", "/health")[0] == 200:
                    return
            assert self._process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < deadline, self.log.read_text()[-3000:]
            time.sleep(0.5)

    def ask(self, method: str, path: str, fields: object = None, token: str = "") -> tuple[int, dict, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        try:
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
            connection.request(method, path, None if fields is None else json.dumps(fields), headers)
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def answer(self, model: Path, message: dict, num_tokens: int) -> tuple[list[int], list[int]]:
        """Return the token ids of a prompt as vLLM has run it, and those of its greedy answer."""
        fields = {
            "model": str(model),
            "messages": [message],
            "temperature": 0,
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        status, _, body = self.ask("POST", "/v1/chat/completions", fields)
        assert status == 200, body
        found = json.loads(body)
        return found["prompt_token_ids"], found["choices"][0]["token_ids"]

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class PageServer(ServerProcess):
    """A process with the page's command and what this machine needs besides, in a folder with the page's paths."""

    def __init__(
        self, command: str, folder: Path, target: Path, first: Path, mine: Path, here: dict[str, object]
    ) -> None:
        """Serve ``target`` with the draft ``first``; ``mine`` is what the page pushes. ``here`` are more flags."""
        for name, place in {
            "path/to/target": target,
            "runs/first/draft": first,
            "runs/mine/draft": mine,
        }.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).symlink_to(place)
        port = free_port()
        flags = {"host": "127.0.0.1", "port": port, **here}
        more = [word for name, value in flags.items() for word in _as_words(name, value)]
        export = shell_block("export SPEC_DRAFT_TOKEN").partition("\n")[0]
        start = command.removeprefix(export).strip()
        script = f"{export}\nprintenv SPEC_DRAFT_TOKEN > token\n{start} {shlex.join(more)}"
        super().__init__(script, folder, port)

    @property
    def token(self) -> str:
        return (self._folder / "token").read_text().strip()

    def push_as_on_the_page(self) -> list[str]:
        """Run the page's ``push`` and ``serving``, its two servers being this one; return their lines."""
        block = re.sub(r"http://127\.0\.0\.1:\d+", self.url, shell_block("spec-trainer push "))
        env = self._env | {"SPEC_DRAFT_TOKEN": self.token}
        done = subprocess.run(
            ["bash", "-euc", block],
            env=env,
            cwd=self._folder,
            capture_output=True,
            text=True,
            timeout=2 * LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()


def _as_words(name: str, value: object) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    return [flag] if value is True else [flag, str(value)]
