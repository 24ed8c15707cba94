"""A server of a process's own thread that streams as vLLM and SGLang do, and counts what it has done.

Its answer to a prompt is a function of the prompt: a number of parts, each of so many tokens. The first part is the
prefill's token, each later one the tokens of a verification.
"""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

NUM_DRAFT_TOKENS = 3


@dataclass
class Streaming:
    """A server's answers, and the questions it has been asked."""

    parts_of: Callable[[str], list[int]] = lambda prompt: [1, *[1 + len(prompt) % 3] * 5]
    """Returns the number of tokens of each part of the answer to a prompt."""
    engine: str = "vllm"
    speculates: bool = True
    key: str = ""
    reports_acceptance: bool = False
    """Whether each answer's end reports its own rounds, as with vLLM's --per-request-spec-decode-metrics."""
    says: str = ""
    """Begins every answer."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    scopes: list[dict[str, Any]] = field(default_factory=list)
    """Path and headers of each question, as an ASGI server passes them to a middleware."""
    most_at_once: int = 0
    requests: int = 0
    generated: int = 0
    per_position: list[int] = field(default_factory=lambda: [0] * NUM_DRAFT_TOKENS)
    rounds: int = 0
    _under_way: int = 0
    _lock: Any = field(default_factory=threading.Lock)

    def answer(self, prompt: str, longest: int) -> Iterator[tuple[str, int]]:
        """Yield text and number of tokens of each part, and count them."""
        with self._lock:
            self._under_way += 1
            self.most_at_once = max(self.most_at_once, self._under_way)
        left = longest
        for place, wanted in enumerate(self.parts_of(prompt)):
            number = min(wanted, left)
            if not number:
                break
            left -= number
            with self._lock:
                self.generated += number
                if self.speculates and place:
                    self.rounds += 1
                    for position in range(number - 1):
                        self.per_position[position] += 1
            yield f"{self.says if not place else ''}{prompt[-1]} {place} ", number
        with self._lock:
            self.requests += 1
            self._under_way -= 1

    def metrics(self) -> str:
        if self.engine == "sglang":
            return (
                f'sglang:generation_tokens_total{{model_name="m"}} {float(self.generated)}\n'
                f'sglang:num_requests_total{{model_name="m"}} {float(self.requests)}\n'
                f'sglang:spec_verify_calls_total{{model_name="m"}} {float(self.rounds)}\n'
            )
        label = '{engine="0",model_name="a \\"b\\" {c}"}'
        prefix = f"{self.engine}:spec_decode_num_"
        lines = [
            f"# TYPE {self.engine}:generation_tokens counter",
            f"{self.engine}:generation_tokens_total{label} {self.generated}.0",
        ]
        if self.speculates:
            lines += [
                f"{prefix}drafts_total{label} {self.rounds}.0",
                f"{prefix}draft_tokens_total{label} {NUM_DRAFT_TOKENS * self.rounds}.0",
                f"{prefix}accepted_tokens_total{label} {sum(self.per_position)}.0",
                *(
                    f'{prefix}accepted_tokens_per_pos_total{{engine="0",position="{place}"}} {count}.0'
                    for place, count in enumerate(self.per_position)
                ),
            ]
        return "\n".join(lines) + "\n"


class Routes(BaseHTTPRequestHandler):
    streaming: Streaming
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if not self._is_admitted():
            return None
        if self.path == "/metrics" and self.streaming.engine:
            return self._send(200, self.streaming.metrics())
        if self.path == "/v1/models":
            return self._send(200, json.dumps({"object": "list", "data": [{"id": "the model"}]}))
        return self._send(404, "")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._is_admitted():
            return
        assert self.headers["Content-Type"] == "application/json"
        self.streaming.bodies.append(body)
        headers = [(name.lower().encode(), value.encode()) for name, value in self.headers.items()]
        self.streaming.scopes.append({"path": self.path, "headers": headers})
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        is_chat = self.path == "/v1/chat/completions"
        prompt = body["messages"][-1]["content"] if is_chat else str(body["prompt"])
        if is_chat:
            self._event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        tokens, rounds = 0, 0
        for place, (text, number) in enumerate(self.streaming.answer(prompt, body["max_tokens"])):
            tokens, rounds = tokens + number, place
            self._event({"choices": [{"delta": {"content": text}} if is_chat else {"text": text}]})
        last: dict[str, Any] = {"choices": [], "usage": {"completion_tokens": tokens}}
        if self.streaming.reports_acceptance:
            length = (tokens - 1) / rounds if rounds else 1.0
            counted = {"mean_acceptance_length": length, "num_spec_steps": rounds}
            last["metrics"] = {"speculative_decoding": counted}
        self._event(last)
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def log_message(self, *args: Any) -> None: ...

    def _is_admitted(self) -> bool:
        key = self.streaming.key
        if key and self.headers["Authorization"] != f"Bearer {key}":
            self._send(401, '{"error": "Unauthorized"}')
            return False
        return True

    def _event(self, part: dict[str, Any]) -> None:
        self._chunk(f"data: {json.dumps(part)}\n\n".encode())

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.wfile.flush()

    def _send(self, code: int, text: str) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


@contextmanager
def streaming(**fields: Any) -> Iterator[tuple[str, Streaming]]:
    """Yield the address of a server and what it is asked."""
    served = Streaming(**fields)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("OwnRoutes", (Routes,), {"streaming": served}))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", served
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def of_bench(url: str, folder: object, *words: object) -> list[object]:
    """Words of a command that asks a server the questions of the benchmark in ``folder``."""
    return ["--server", url, "--bench", "gsm8k", "--bench-data", folder, "--json", *words]
