"""A server that answers what it is asked and keeps requests to be learnt from: engine hf behind HttpReplica's routes.

``python live_server.py TARGET DRAFT PORT`` serves until it is killed; port 0 is any free one. POST ``/ask`` with
``{"prompts": [[…], …]}`` answers greedily, with the draft that serves; so does POST ``/v1/completions``. GET
``/metrics`` are those of a vLLM that has answered with the latency that GET ``/latency/MS`` has set, 100 tokens since
the last look. What it keeps is what ``SPEC_LIVE_REQUESTS`` says, labelled by path and header, but for
the other headers and the fields of a request, which this protocol has not.
"""

import itertools
import json
import os
import sys
import threading
from contextlib import closing, contextmanager
from functools import partial
from http.client import HTTPConnection
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

try:
    from . import draft_server
except ImportError:  # as a program
    import draft_server

from collections.abc import Iterator

from spec_core.records import FeatureSchema
from spec_kit.live_traffic import LiveRequests, LiveRequestsConfig, ServerMetrics, StateRows
from spec_kit.live_traffic.served_states import StatesRange

LAYERS = (1, 2, 3)
"""Layers whose states the server captures, besides the final norm's input."""


class Served(draft_server.Served):
    """An engine whose traffic comes from outside."""

    def __init__(self, target: Path, draft: Path) -> None:
        super().__init__(target, draft)
        self.requests = LiveRequests.from_environment()
        config = LiveRequestsConfig.from_environment()
        self.states = None if config is None or not config.states_bytes else States(target, config)
        self._asking = threading.Lock()
        self.latency_ms = 1
        self._latencies = dict.fromkeys((10, 100, 1000), 0)

    def ask(self, prompts: list[list[int]], label: str) -> dict[str, Any]:
        """Return the answers, and the versions that they name."""
        with self._asking:
            answers = self.engine.generate(prompts, draft_server.DRAFTING)
        for prompt, answer in zip(prompts, answers, strict=True):
            if self.requests is not None:
                key = self.states and self.states.add([*prompt, *answer.token_ids])
                self.requests.add(prompt, answer.token_ids, label, key)
        return {
            "answers": draft_server.tokens(answers),
            "versions": [answer.draft_version for answer in answers],
        }

    def metrics(self) -> str:
        """Return a page of metrics; count 100 further tokens, of the latency that is set."""
        for bound in self._latencies:
            self._latencies[bound] += 100 * (self.latency_ms <= bound)
        name = "vllm:inter_token_latency_seconds_bucket"
        lines = [f'{name}{{le="{bound / 1000}"}} {count}' for bound, count in self._latencies.items()]
        total = max(self._latencies.values())
        return "\n".join(
            [f"vllm:generation_tokens_total {total}", *lines, f'{name}{{le="+Inf"}} {total}', ""]
        )


class States:
    """States of requests, as a server has them that captures what it serves: by Transformers, with no guess wrong."""

    def __init__(self, target: Path, config: LiveRequestsConfig) -> None:
        from spec_testing import TransformersTarget

        self._model = TransformersTarget(target)
        sizes = self._model.model.config
        layers = (*LAYERS, sizes.num_hidden_layers)
        self._schema = FeatureSchema(layers=layers, hidden_size=sizes.hidden_size, dtype="float32")
        self._rows = StateRows(self._schema, config.states_bytes, config.age_s)
        self._keys = itertools.count()

    def add(self, token_ids: list[int]) -> str:
        """Capture a request; return the name of its states."""
        key = f"{next(self._keys):016x}"
        hidden_TNH = self._model.hidden(token_ids[:-1])[:, list(self._schema.layers)]
        self._rows.begin(key)
        self._rows.write(key, 0, token_ids[:-1], hidden_TNH)
        self._rows.end(key)
        return key

    def answer(self, body: str) -> tuple[int, Any]:
        """Return the answer of the route."""
        answer = self._rows.layout() if body == "{}" else self._rows.read(StatesRange.decode(body))
        return (410 if "left_out" in answer else 200), answer.get("piece", answer)


class Routes(draft_server.Routes):
    served: Served

    def do_GET(self) -> None:
        if self.path.startswith("/latency/"):
            self.served.latency_ms = int(self.path.rpartition("/")[2])
            return self._send(200, {})
        if self.path != "/metrics":
            return super().do_GET()
        page = self.served.metrics().encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)
        return None

    def do_POST(self) -> None:
        if self.path in ("/ask", "/v1/completions"):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            return self._send(200, self.served.ask(json.loads(body)["prompts"], self._label()))
        return super().do_POST()

    def _label(self) -> str:
        if self.served.requests is None:
            return ""
        headers = [(name.lower().encode(), value.encode()) for name, value in self.headers.items()]
        self.served.requests.begin({"path": self.path, "headers": headers}, no_more)
        return self.served.requests.label

    def _answer(self, body: str) -> None:
        is_admitted = self.headers.get("Authorization", "") == f"Bearer {draft_server.TOKEN}"
        if self.path == "/spec/draft/requests" and is_admitted and self.served.requests is not None:
            return self._send(200, self.served.requests.take())
        if self.path == "/spec/draft/states" and is_admitted:
            return self._send_states(body)
        return super()._answer(body)

    def _send_states(self, body: str) -> None:
        if self.served.states is None:
            return self._send(409, {"error": "this server captures no states"})
        status, content = self.served.states.answer(body)
        if isinstance(content, dict):
            return self._send(status, content)
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
        return None


async def no_more() -> dict[str, Any]:
    return {}


def ask(url: str, prompts: list[list[int]], path: str = "/ask", **headers: str) -> dict[str, Any]:
    """Return what ``/ask`` answers."""
    connection = HTTPConnection(url.removeprefix("http://"), timeout=120)
    with closing(connection):
        connection.request("POST", path, json.dumps({"prompts": prompts}), headers)
        response = connection.getresponse()
        assert response.status == 200
        return json.loads(response.read())


def scraped(address: str) -> ServerMetrics:
    """Return the metrics of an address HOST:PORT."""
    with closing(HTTPConnection(address, timeout=60)) as connection:
        connection.request("GET", "/metrics")
        return ServerMetrics(connection.getresponse().read().decode())


@contextmanager
def serving(target: Path, draft: Path) -> Iterator[str]:
    """Yield the address of a server in threads of this process, which need not start another one and import torch."""
    served = Served(target, draft)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Routes, served))
    with served.engine, server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def main() -> None:
    served = Served(Path(sys.argv[1]), Path(sys.argv[2]))
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[3])), partial(Routes, served))
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
