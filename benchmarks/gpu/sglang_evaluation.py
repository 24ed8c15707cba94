"""Latencies that ``evaluate`` tells of the real SGLang, beside an HTTP client's; prints one JSON document.

::

    python -m benchmarks.gpu.sglang_evaluation --target DIR --draft DIR --output DIR [-- engine.KEY=VALUE …]

Not a test: run it by hand. It runs ``spec-trainer evaluate --engine sglang`` with four benchmarks at several numbers
of answers at once; a quickstart leaves a target and a draft for it. Of each load, with the draft and without it, the
mean time to the first token and the mean inter-token latency have to be within 5 % of what a client measures of the
same requests, which SGLang's own process streams to it by HTTP. The exit code is 1 if they are not. The client's
times are those that SGLang's process writes beside each part; ``as_read`` has those at which the client read it.
``--output`` keeps the document, and that of ``evaluate``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tests.distributions import write_distribution
from tests.engines.bench_rows import ROWS, write_rows
from tests.engines.stream_client import Client, Watch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TESTS = Path(__file__).parents[2] / "tests" / "engines"
WITHIN = 0.05
SIDES = ("without_draft", "with_draft")
"""In the order in which they are decoded; SGLang starts anew for the second."""
FIGURES = ("time_to_first_token_ms", "inter_token_latency_ms")
GPU_BOX = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": "true",
    "disable_radix_cache": "true",
    "mem_fraction_static": "0.3",
    "max_total_tokens": "131072",
    "max_running_requests": "48",
}


def main() -> None:
    words = argparse.ArgumentParser()
    words.add_argument("--output", type=Path, required=True)
    words.add_argument("--target", type=Path, required=True)
    words.add_argument("--draft", type=Path, required=True)
    words.add_argument("--backend", default="cuda")
    words.add_argument("--draft-tokens", type=int, default=3)
    words.add_argument("--new-tokens", type=int, default=128)
    words.add_argument("--repeated", type=int, default=4, help="rows of each benchmark")
    words.add_argument("--concurrency", default="1,2,4,8")
    words.add_argument("words", nargs="*", help="of the engine, behind --; by default those for one GPU")
    given = words.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    document = measure(
        given.output,
        given.target,
        given.draft,
        given.words or [f"engine.args.{key}={value}" for key, value in GPU_BOX.items()],
        backend=given.backend,
        draft_tokens=given.draft_tokens,
        new_tokens=given.new_tokens,
        repeated=given.repeated,
        concurrency=given.concurrency,
    )
    (given.output / "sglang-evaluation.json").write_text(json.dumps(document, indent=2))
    print(json.dumps(document, indent=2))
    sys.exit(document["largest_difference"] > WITHIN)


def measure(
    output: Path,
    target: Path,
    draft: Path,
    words: Sequence[str],
    *,
    backend: str,
    draft_tokens: int,
    new_tokens: int,
    repeated: int,
    concurrency: str,
    environment: Mapping[str, str] = os.environ,
) -> dict[str, Any]:
    """Evaluate the draft, and return the document of this script."""
    write_rows(output / "rows", repeated)
    streams = output / "streams"
    streams.mkdir()
    asked = {
        "target": target,
        "draft-model": draft,
        "engine": "sglang",
        "backend": backend,
        "bench": ",".join(ROWS),
        "bench-data": output / "rows",
        "num-draft-tokens": draft_tokens,
        "max-new-tokens": new_tokens,
        "temperature": 0,
        "concurrency": concurrency,
    }
    flags = [word for name, value in asked.items() for word in (f"--{name}", str(value))]
    with Watch(streams) as watch:
        told = command(
            "evaluate", *flags, "--no-stop-at-eos", "--json", *words, environment=rigged(environment, streams)
        )
    (output / "evaluation.json").write_text(told)
    figures = json.loads(told)
    loads = list(compare(figures, watch.clients, new_tokens))
    return {
        "date": date.today().isoformat(),
        "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.platform(),
        "versions": {
            **figures["engine_versions"],
            "torch": torch.__version__,
            "trainer": version("spec-trainer"),
        },
        "target": str(target),
        "draft": str(draft),
        "words": list(words),
        "prompts": figures["prompts"],
        "new_tokens": new_tokens,
        "acceptance_length": figures["acceptance_length"],
        "outputs_equal": figures["outputs_equal"],
        "latest_line_read_ms": 1e3 * max(max(client.late_s) for client in watch.clients),
        "loads": loads,
        "largest_difference": max(difference for load in loads for difference in load["differences"]),
    }


def compare(figures: dict[str, Any], clients: Sequence[Client], new_tokens: int):
    """Yield a row for each load and side; the requests of a warm-up have fewer tokens than those that are timed."""
    assert len(clients) == len(SIDES), f"{len(clients)} processes streamed"
    for side, client in zip(SIDES, clients, strict=True):
        done = 0
        for load in figures["throughput"]:
            requests = max(load["concurrency"], figures["prompts"])
            timed = slice(done, done + requests)
            done = timed.stop
            client_ms = client.times(timed, new_tokens)
            read_ms = client.times(timed, new_tokens, as_read=True)
            ours_ms = [load[side][name]["mean"] for name in FIGURES]
            yield {
                "concurrency": load["concurrency"],
                "side": side,
                "requests": requests,
                "ours_ms": dict(zip(FIGURES, ours_ms, strict=True)),
                "client_ms": dict(zip(FIGURES, client_ms, strict=True)),
                "client_ms_as_read": dict(zip(FIGURES, read_ms, strict=True)),
                "differences": [
                    abs(ours - theirs) / theirs for ours, theirs in zip(ours_ms, client_ms, strict=True)
                ],
            }
        streamed = len(client.whole(new_tokens))
        assert streamed == done, f"{streamed} whole requests were streamed, {done} expected"


def rigged(environment: Mapping[str, str], streams: Path) -> dict[str, str]:
    """Return the environment of an SGLang that loads the rig and opens its streams in a folder."""
    points = "[sglang.srt.plugins]\nspec_rig = spec_sglang_rig:install\n"
    rig = write_distribution(streams / "rig", "spec-sglang-rig", points)
    paths = [TESTS / "sglang_rig", TESTS / "rig_streams", rig, environment.get("PYTHONPATH", "")]
    found = os.pathsep.join(str(path) for path in paths if str(path))
    return {**environment, "PYTHONPATH": found, "SPEC_TEST_STREAMS": str(streams)}


def command(*words: object, environment: Mapping[str, str] = os.environ) -> str:
    """Run a command of spec-trainer; return what it prints."""
    line = [sys.executable, "-c", "from spec_trainer.cli.app import main; main()", *map(str, words)]
    return subprocess.run(line, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout


if __name__ == "__main__":
    main()
