"""The processes of ``follow_serving``: servers with and without a draft, their load, and ``follow``."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commands import output_of
from follow_figures import device_memory, moment, trained
from push_server import (
    DRAFT_TOKENS,
    ENVIRONMENT,
    flag_words,
    free_port,
    on_device,
    program,
    ready,
    speculative_flags,
)
from random_dataset import write_random_dataset
from real_run import SPEC_TRAINER

from spec_kit.live_traffic import LIVE_REQUESTS_VARIABLE

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping, Sequence

    from follow_figures import Window
    from push_server import Program

HERE = Path(__file__).parent
SHARE = 0.1
"""``share`` of the server that stores requests; a header of the load makes it all of them."""
STATES_BYTES = 4 << 30
"""Host memory for the states that the server ``states`` captures."""
ALL = {"x-draft-learn": "yes"}
SPARE_POSITIONS = 64
NUM_ROWS = 2048
SAVING_S = 60.0
"""Time that ``follow`` has for its last checkpoint and the copy of the served draft."""
WITH_DRAFT = ("plain", "live", "states")
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


def write_inputs(options: argparse.Namespace) -> Path:
    """Write target, data and a draft of fresh weights where they are not there yet; return the draft's folder."""
    if not (options.target / "config.json").exists():
        random = [options.shape, str(options.target), "--dtype", options.dtype]
        _write(options, "random_target.py", *random, *["--shallow"] * options.shallow)
    if options.draft_vocab_size and options.data is None:
        options.data = options.folder / "data.jsonl"
        length = options.prompt_tokens + options.new_tokens
        if options.shallow:
            _write(options, "shallow_answers.py", options.target, options.data, NUM_ROWS, length)
        else:
            write_random_dataset(options.data, NUM_ROWS, length, vocab_size(options), 0.5)
    if options.draft_model is None:
        options.draft_model = options.folder / "fresh"
        if not options.draft_model.exists():
            words = [*draft_words(options), f"output={options.folder / 'unused'}"]
            _write(options, "follow_draft.py", options.draft_model, json.dumps(words))
    if options.day_0 and options.shallow and options.text is None and options.data is not None:
        options.text = options.folder / "texts.json"
        rows = [json.loads(line)["input_ids"] for line in options.data.read_text().splitlines()]
        options.text.write_text(
            json.dumps([ids[: 2 * options.prompt_tokens] for ids in rows[: options.texts]])
        )
    return options.draft_model


def _write(options: argparse.Namespace, program: str, *words: object) -> None:
    """Run another program of this folder to its end."""
    command = [sys.executable, str(HERE / program), *map(str, words)]
    output_of(command, (options.folder / program).with_suffix(".log"), options.limit_s)


def vocab_size(options: argparse.Namespace) -> int:
    """Return the number of tokens of the target."""
    return json.loads((options.target / "config.json").read_text())["vocab_size"]


def draft_words(options: argparse.Namespace) -> list[str]:
    """Return the configuration that the fresh draft and every ``follow`` share."""
    words = [
        f"target={options.target}",
        f"draft.name={options.draft}",
        f"backend.name={options.backend}",
        f"train.dtype={options.dtype}",
        f"data.max_length={options.prompt_tokens + options.new_tokens}",
    ]
    if options.data is not None:
        words.append(f"data.path={options.data}")
    if options.draft_vocab_size:
        words.append(f"draft.vocab_size={options.draft_vocab_size}")
    return words


class Servers:
    """Servers on the first device; those that are not asked do nothing there but hold memory."""

    def __init__(self, options: argparse.Namespace, environment: Mapping[str, str]) -> None:
        """Start nothing yet."""
        self._options, self._environment = options, environment
        self._running: dict[str, tuple[ExitStack, Program, int, Path]] = {}

    def __enter__(self) -> Servers:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End every server."""
        self.stop(*self._running)

    def start(self, *names: str) -> None:
        """Start the servers that do not run, at the same time."""
        for name in names:
            if name not in self._running:
                port, log = free_port(), self._options.folder / f"server-{name}.log"
                stack = ExitStack()
                command = COMMANDS[self._options.server](self._options, name, port)
                env = {**on_device(0), **self._environment, **server_environment(self._options, name)}
                server = stack.enter_context(program(command, log, env, answers=False))
                self._running[name] = stack, server, port, log

    def stop(self, *names: str) -> None:
        """End some servers."""
        for name in names:
            stack, *_ = self._running.pop(name)
            stack.close()

    def url(self, name: str) -> str:
        """Return the address of a server, which answers; start it if it does not run, alone if so chosen."""
        if self._options.one_at_a_time:
            self.stop(*(other for other in list(self._running) if other != name))
        self.start(name)
        _, server, port, log = self._running[name]
        return ready(server, port, log, self._options.limit_s)


def vllm_command(options: argparse.Namespace, name: str, port: int) -> list[str]:
    """Return the command of a server of vLLM, by one of the names of ``Phase.server``."""
    draft = {
        "method": options.draft,
        "model": str(options.draft_model),
        "num_speculative_tokens": DRAFT_TOKENS[options.draft],
    }
    speculation = {"ngram": NGRAM, "no-draft": None}.get(name, draft)
    flags: dict[str, Any] = {
        "model": options.target,
        "host": "127.0.0.1",
        "port": port,
        "dtype": options.dtype,
        "max-model-len": options.prompt_tokens + options.new_tokens + SPARE_POSITIONS,
        "max-num-seqs": options.streams,
        "kv-cache-memory-bytes": int(options.kv_gib * (1 << 30)),
    }
    if speculation is not None:
        flags["speculative-config"] = json.dumps(speculation)
    if name in WITH_DRAFT:
        flags["worker-extension-cls"] = "spec_engine_vllm.worker_extension.WorkerExtension"
        flags["middleware"] = "spec_engine_vllm.draft_routes.DraftRoutes"
    if options.backend != "cpu":
        flags["gpu-memory-utilization"] = options.gpu_memory_utilization
    switches = ["--tokens-only", *(["--enforce-eager"] if options.backend == "cpu" else [])]
    return [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        *flag_words(flags),
        *switches,
        *options.words,
    ]


def sglang_command(options: argparse.Namespace, name: str, port: int) -> list[str]:
    """Return the command of a server of SGLang, by one of the names of ``Phase.server``."""
    flags: dict[str, Any] = {
        "model-path": options.target,
        "host": "127.0.0.1",
        "port": port,
        "dtype": options.dtype,
        "context-length": options.prompt_tokens + options.new_tokens + SPARE_POSITIONS,
        "max-running-requests": options.streams,
    }
    if options.backend != "cpu":
        flags["mem-fraction-static"] = options.gpu_memory_utilization
    if name in WITH_DRAFT:
        flags |= speculative_flags(options.draft, options.draft_model)
    elif name == "ngram":
        flags |= {"speculative-algorithm": "NGRAM", "speculative-num-draft-tokens": 4}
    switches = ["--skip-tokenizer-init", "--skip-server-warmup", "--enable-metrics"]
    return [sys.executable, "-m", "sglang.launch_server", *flag_words(flags), *switches, *options.words]


COMMANDS = {"vllm": vllm_command, "sglang": sglang_command}


def server_environment(options: argparse.Namespace, name: str) -> dict[str, str]:
    cache = {
        "VLLM_CACHE_ROOT": str(options.cache / name)
    }  # two servers that compile the same never share a file
    env = {**ENVIRONMENT, **cache, "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    stored = {"live": {"share": SHARE}, "states": {"share": SHARE, "states_bytes": STATES_BYTES}}
    env[LIVE_REQUESTS_VARIABLE] = json.dumps(stored[name]) if name in stored else ""
    return env


@contextmanager
def loaded(options: argparse.Namespace, url: str, phase: str, *, everything: bool) -> Iterator[list[Any]]:
    """Keep the load on a server during the block; fill the list that it gets with the answers at its end."""
    load = {
        "streams": options.streams,
        "new_tokens": options.new_tokens,
        "prompt_tokens": options.prompt_tokens,
        "vocab_size": vocab_size(options),
        "server": options.server,
        "seed": phase,
        "rows": None if options.text is None else str(options.text),
        "headers": ALL if everything else {},
    }
    command = [sys.executable, str(HERE / "serving_load.py"), url, json.dumps(load)]
    answers: list[Any] = []
    with program(command, options.folder / f"load-{phase}.log") as running:
        yield answers
        answers += running.finish(options.limit_s)


def warm_up(options: argparse.Namespace, url: str) -> None:
    """Return once each stream may have had a token, and some seconds later."""
    begun, deadline = moment(url, None), time.monotonic() + options.limit_s
    while time.monotonic() < deadline:
        since = moment(url, None).counters - begun.counters
        if since.generated_tokens >= options.streams:
            break
        time.sleep(0.5)
    time.sleep(options.warm_s)


class Follower:
    """``spec-trainer follow`` under way."""

    def __init__(self, process: Program, run: Path, log: Path) -> None:
        """Watch a process by its run directory and log."""
        self._process, self.run, self._log = process, run, log

    def wait(self, limit_s: float) -> float:
        """Wait until it has trained its first step; return the seconds that it took."""
        begun = time.monotonic()
        while not trained(self.run)["steps"]:
            self._process.check()
            if time.monotonic() - begun > limit_s:
                raise SystemExit(f"follow has trained nothing within {limit_s:.0f} s; see {self._log}")
            time.sleep(0.5)
        return time.monotonic() - begun

    def check(self) -> None:
        """End the benchmark where the command has ended."""
        self._process.check()

    def notes(self) -> list[str]:
        """Return what it has logged about waits, pushes and problems."""
        words = (" W ", " E ", "training waits", "training goes on", "servers have the draft", "after ")
        lines = self._log.read_text(errors="replace").splitlines()
        return [line for line in lines if any(word in line for word in words)][-60:]


@contextmanager
def following(
    options: argparse.Namespace,
    url: str,
    phase: str,
    device: int,
    words: Sequence[str],
    environment: Mapping[str, str],
    *,
    captures: bool = True,
) -> Iterator[Follower]:
    """Run ``spec-trainer follow`` on a device during the block; ``captures``: with an engine of its own."""
    run, log = options.folder / f"run-{phase}", options.folder / f"follow-{phase}.log"
    settings = [
        *draft_words(options),
        f"output={run}",
        f"draft.init_from={options.draft_model}",
        f"follow.servers=[{url}]",
        f"follow.every={options.every}",
        f"follow.passes={options.passes}",
        "follow.poll_s=1",
        f"train.lr={options.lr}",
        "train.warmup_steps=0",
        "train.keep=1",
        f"train.global_batch_tokens={options.batch_tokens}",
        *words,
        *options.set,
    ]
    if not captures:
        settings = [word for word in settings if not word.startswith("data.path=")]
        settings.append("follow.capture=serving")
    env = on_device(device) | environment
    command = [*SPEC_TRAINER, "follow", *settings]
    with program(command, log, env, answers=False, leaving_s=SAVING_S) as process:
        yield Follower(process, run, log)


def watched(
    url: str, run: Path | None, seconds: float, check: Follower | None
) -> tuple[Window, Window, list[dict[str, int]]]:
    """Return the moments before and after ``seconds``, and the largest memory of each GPU in between."""
    begun, memory = moment(url, run), list[list[dict[str, int]]]()
    while (left_s := begun.begun_s + seconds - time.monotonic()) > 0:
        memory.append(device_memory())
        if check is not None:
            check.check()
        time.sleep(min(left_s, 5.0))
    largest = [
        {key: max(row[key] for row in rows) for key in rows[0]} for rows in zip(*memory, strict=False) if rows
    ]
    return begun, moment(url, run), largest


def chosen_mps(options: argparse.Namespace, stack: ExitStack) -> tuple[dict[str, str], dict[str, str]]:
    """Return variables of the servers and of ``follow``: they share the GPU at the same time under ``--mps``."""
    if options.mps is None:
        return {}, {}
    from spec_backend_cuda.mps import mps_daemon

    daemon = stack.enter_context(mps_daemon())
    shared = dict(daemon.environment)
    os.environ.pop("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", None)
    return shared, {**shared, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(options.mps)}
