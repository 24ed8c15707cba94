"""A server with live traffic whose draft can be pushed: engine hf behind the routes that HttpReplica asks for.

``python draft_server.py TARGET DRAFT`` serves until it is killed, or whoever started it has ended. Beside
``/spec/draft/…`` it answers GET ``/traffic``: how many answers there were, and whether every greedy one was what the
target says without a draft.
GET ``/stream`` sends each answer when it is there, with the draft that it names, for ever.
After GET ``/hang`` it takes connections and answers nothing.
"""

import hmac
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from spec_core import Engine, EngineContext, UpdateId, UpdateRequest, plugins
from spec_core.errors import SpecError
from spec_core.records import AcceptanceCounters, Generation, SamplingParams
from spec_kit.hosting import AnswerCounts, AnswerRounds
from spec_kit.targets import read_target
from spec_testing.reference import reference_backend

TOKEN = "the secret of the test"
ARGUMENTS = {"prepare": UpdateRequest, "commit": UpdateId, "abort": UpdateId, "revert": UpdateId}
PROMPTS = [[3, 14, 15, 92, 65], [35, 89, 79]]
PLAIN = SamplingParams(max_new_tokens=24)
PAUSE_S = 0.25
"""Between two answers: whoever is tested beside the server needs the machine, too."""
DRAFTING = SamplingParams(max_new_tokens=24, num_draft_tokens=3)


def new_engine(target: Path) -> Engine:
    engine_type = plugins.load_available(Engine, "hf")
    context = EngineContext(backend=reference_backend())
    return engine_type.create(engine_type.Config(max_num_seqs=32), read_target(target), context)


def generate(engine: Engine, sampling: SamplingParams = PLAIN) -> list[list[int]]:
    return tokens(engine.generate(PROMPTS, sampling))


def tokens(answers: Sequence[Generation]) -> list[list[int]]:
    return [list(answer.token_ids) for answer in answers]


def answers(target: Path) -> list[list[int]]:
    """Return the prompts of the traffic, each with the target's answer."""
    with new_engine(target) as engine:
        return [prompt + answer for prompt, answer in zip(PROMPTS, generate(engine), strict=True)]


class Served:
    """An engine, its draft's replica, and what its traffic has come to."""

    def __init__(self, target: Path, draft: Path) -> None:
        self.engine = new_engine(target)
        self.answers, self.as_without = 0, True
        self._plain = generate(self.engine)
        self.engine.load_draft(draft)
        self.replica = self.engine.draft_replica()
        self._counts = AnswerCounts()
        self._newest: list[dict[str, Any]] = []
        """The last answers, each as it is streamed."""
        self._answered = threading.Condition()

    def answer_while(self, parent: int) -> None:
        """Answer for as long as this process is a child of ``parent``."""
        while os.getppid() == parent:
            counts = self._counts
            answers = self.engine.generate(PROMPTS, DRAFTING)
            self.as_without &= tokens(answers) == self._plain
            with self._answered:
                for answer in answers:
                    _count(counts, answer)
                self.answers += len(PROMPTS)
                self._newest = [
                    {
                        "version": answer.draft_version,
                        "digest": answer.draft_digest,
                        "as_without": self.as_without,
                    }
                    for answer in answers
                ]
                self._answered.notify_all()
            time.sleep(PAUSE_S)

    def stream(self) -> Iterator[dict[str, Any]]:
        """Yield what each answer from now on names, for ever."""
        while True:
            with self._answered:
                self._answered.wait()
                newest = self._newest
            yield from newest

    def call(self, name: str, body: str, held: dict[str, list[str]]) -> dict[str, Any]:
        if held:
            rounds, wait_s = int(held["rounds"][0]), float(held["wait_s"][0])
            with self._answered:
                self._answered.wait_for(lambda: self._acceptance().rounds >= rounds, wait_s)
        if name == "status":
            status = self.replica.status()
        else:
            status = getattr(self.replica, name)(ARGUMENTS[name].model_validate_json(body))
            if name in ("commit", "revert") and status.exception() is None:
                self._counts = AnswerCounts()
        return {
            "status": status.result().model_dump(mode="json"),
            "ranks": self.replica.num_ranks,
            "acceptance": asdict(self._acceptance()),
        }

    def _acceptance(self) -> AcceptanceCounters:
        """Return the counts of answers that began after the draft last changed."""
        return self._counts.counted(DRAFTING.num_draft_tokens)


def _count(counts: AnswerCounts, answer: Generation) -> None:
    had = AnswerRounds()
    for accepted, rounds in enumerate(answer.verifications):
        for _ in range(rounds):
            had = counts.add(had, accepted)


class Routes(BaseHTTPRequestHandler):
    def __init__(self, served: Served, *args: Any) -> None:
        self.served = served
        super().__init__(*args)

    def do_GET(self) -> None:
        if self.path == "/traffic":
            self._send(200, {"answers": self.served.answers, "as_without": self.served.as_without})
        elif self.path == "/stream":
            self.send_response(200)
            self.end_headers()
            for answer in self.served.stream():
                self.wfile.write(json.dumps(answer).encode() + b"\n")
        elif self.path == "/hang":
            self._send(200, {})
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            self._answer("")

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers["Content-Length"])).decode())

    def log_message(self, *args: Any) -> None: ...

    def _answer(self, body: str) -> None:
        if not hmac.compare_digest(self.headers.get("Authorization", ""), f"Bearer {TOKEN}"):
            return self._send(401, {"error": "wrong token"})
        try:
            parts = urlsplit(self.path)
            fields = self.served.call(parts.path.removeprefix("/spec/draft/"), body, parse_qs(parts.query))
        except SpecError as error:
            return self._send(409, {"error": str(error)})
        return self._send(200, fields)

    def _send(self, code: int, fields: dict[str, Any]) -> None:
        body = json.dumps(fields).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def serving(target: Path, draft: Path, program: str = __file__, *words: object) -> Iterator[str]:
    """Yield the address of a server in a process of its own."""
    command = [sys.executable, program, *map(str, (target, draft, *words))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = process.stdout.readline().strip()
            assert port, "the server did not start"
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def traffic(url: str, path: str = "/traffic") -> dict[str, Any]:
    """Return what ``/traffic`` answers."""
    connection = HTTPConnection(url.removeprefix("http://"), timeout=30)
    connection.request("GET", path)
    return json.loads(connection.getresponse().read())


def main() -> None:
    parent = os.getppid()
    served = Served(Path(sys.argv[1]), Path(sys.argv[2]))
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Routes, served))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    served.answer_while(parent)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
