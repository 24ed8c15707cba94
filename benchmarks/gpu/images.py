"""Check on a GPU what engines make of images: features, texts and guesses; print one JSON document. It is no test.

::

    python -m benchmarks.gpu.images --engine vllm --output DIR [--kind qwen3_vl …] [--dtype bfloat16] …

Run it by hand, from the repository's root. The targets are tiny and random (``tests/seeing_targets.py``).

``features``: samples with 0, 1 and 3 images of different sizes are captured by the engine and by engine ``hf``, both
in ``--dtype``, and compared at every row with Transformers in float32. A figure is a layer's largest |a - b| / |b|.
Two programs that round to bfloat16 after each operation are about equally far from float32, so the engine may be at
most ``MOST_TIMES`` as far from it as engine ``hf`` is. ``other_images`` and ``index_positions`` tell how far wrong
features are: those of other images, and those with token indices as positions. The engine must be nearer by
``LEAST_TIMES``.

``drafts``: drafts are trained a little and served by the printed command. ``same_texts`` counts greedy texts that are
those of a server without a draft (set VLLM_BATCH_INVARIANT=1, else near ties part them). ``same_guesses`` (vLLM)
counts rounds whose guesses are those of our proposer in float32. Guesses part at near ties, too.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import shlex
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import torch
from tests.captured_states import captured
from tests.distributions import write_distribution
from tests.engines.page_server import ServerProcess
from tests.engines.replay import Replay
from tests.image_requests import picture, question, reference_states, request_of
from tests.seeing_targets import SEEING, save_seeing_target

from spec_core import Backend, Engine, EngineContext, plugins
from spec_core.records import CaptureRequest, FeatureSchema, SamplingParams
from spec_engine_hf.engine import HfConfig, HfEngine
from spec_kit.drafting.draft_folder import recognise
from spec_kit.streams.inline_transport import InlineTransport
from spec_kit.targets.target_reader import read_target

log = logging.getLogger("images")

TESTS = Path(__file__).parents[2] / "tests" / "engines"
LIMIT_S = 300.0
BATCH_TOKENS = 256
MAX_LENGTH = 256
NEW_TOKENS = 48
PROMPTS = 40
COMPARED_PROMPTS = 6
"""Prompts whose rounds are compared with our proposer's."""
NUM_DRAFT_TOKENS = 3
PATCH = 14
"""The size that SGLang expects."""
SIZES = ((84, 84), (116, 165), (28, 315), (28, 28))
"""The image processor keeps the first, and scales the others."""
MOST_TIMES = 2.0
LEAST_TIMES = 2.5
"""Wrong features are at least so many times as far from float32 as the engine's."""
LEAST_GUESSES = {"bfloat16": 0.85, "float32": 0.95}
"""Least share of rounds with our proposer's guesses; with float32, GPU kernels multiply in TF32."""
DRAFTS = {
    "eagle3": ["draft.num_steps=3", "draft.intermediate_size=256", "train.lr=8e-3"],
    "dflash": ["draft.block_size=4", "draft.num_layers=1", "draft.num_features=3", "train.lr=3e-3"],
}
ENGINE_ARGUMENTS = {
    ("vllm", "cuda"): {},
    ("vllm", "cpu"): {"block_size": 32, "distributed_executor_backend": "uni"},
    ("sglang", "cpu"): {
        "device": "cpu",
        "prefill_attention_backend": "intel_amx",
        "decode_attention_backend": "intel_amx",
        "sampling_backend": "pytorch",
        "mm_attention_backend": "sdpa",
        "disable_cuda_graph": True,
        "max_total_tokens": 8192,
        "mem_fraction_static": 0.3,
    },
    ("sglang", "cuda"): {
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "mm_attention_backend": "triton_attn",
        "disable_cuda_graph": True,
        "max_total_tokens": 8192,
    },
}
VLLM_FLAGS = {
    "cuda": ["--kv-cache-memory-bytes=268435456", "--gpu-memory-utilization=0.05"],
    "cpu": ["--kv-cache-memory-bytes=67108864"],
}
SERVER_VARIABLES = {
    "cuda": {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_V2_MODEL_RUNNER": "1"},
    "cpu": {"VLLM_CPU_CI_ENV": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
}


def main() -> None:
    words = argparse.ArgumentParser()
    words.add_argument("--engine", choices=("vllm", "sglang"), required=True)
    words.add_argument("--output", type=Path, required=True)
    words.add_argument("--kind", nargs="+", default=list(SEEING))
    words.add_argument("--draft", nargs="*", default=list(DRAFTS))
    words.add_argument("--dtype", default="bfloat16")
    words.add_argument("--backend", default="cuda")
    words.add_argument("--start-s", type=float, default=250.0, help="longest start of an engine or a server")
    words.add_argument("--no-features", action="store_true")
    words.add_argument("--no-shared-prefixes", action="store_true")
    given = words.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    given.output = given.output.resolve()
    given.output.mkdir(parents=True, exist_ok=True)
    document = {"engine": given.engine, "versions": versions(), "device": device_name(), "dtype": given.dtype}
    document["batch_invariant"] = os.environ.get("VLLM_BATCH_INVARIANT")
    for kind in given.kind:
        found = document[kind] = {}
        target = given.output / kind
        target.mkdir(exist_ok=True)
        save_seeing_target(target, kind, 128, 64, 128, PATCH)
        phases = {} if given.no_features else {"features": features}
        if given.draft:
            phases["drafts"] = drafts
            write_rows(given, target)
        with workers(given) as threads:
            running = {name: threads.submit(phase, given, target) for name, phase in phases.items()}
        for name, future in running.items():
            try:
                found[name] = future.result()
            except Exception as error:  # the other figures are kept
                log.exception("%s of %s", name, kind)
                found[name] = {"error": f"{type(error).__name__}: {error}"[-1500:], "ok": False}
        (given.output / "images.json").write_text(json.dumps(document, indent=1))
    parts = [part for kind in given.kind for part in document[kind].values()]
    document["ok"] = bool(parts) and all(part["ok"] for part in parts)
    print(json.dumps(document, indent=1))


def versions() -> dict[str, str]:
    found = {}
    for name in ("vllm", "vllm-cpu", "sglang", "torch", "torchvision", "transformers"):
        with suppress(ImportError):
            found[name] = version(name)
    return found


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def workers(given) -> ThreadPoolExecutor:
    """Return threads for engines and servers: on a GPU they start at the same time."""
    return ThreadPoolExecutor(1 if given.backend == "cpu" else 8)


def backend_of(given):
    backend_type = plugins.load_available(Backend, given.backend)
    return backend_type(backend_type.Config(name=given.backend))


# Features.


def features(given, folder: Path) -> dict:
    pictures = [[picture(size, seed) for size in SIZES[:3]] for seed in range(2)]
    shown = [[], pictures[0][:1], pictures[1][:1], pictures[0], pictures[1], pictures[0][1:2]]
    requests = [request_of(folder, own) for own in shown]
    target = read_target(folder)
    first = 1 if given.engine == "vllm" and given.backend != "cpu" else 0  # VllmEngine.check_capture
    layers = tuple(range(first, target.num_layers + 1))
    schema = FeatureSchema(layers=layers, hidden_size=target.hidden_size, dtype=given.dtype)
    exact = [
        reference_states(folder, request, own)[:, first:]
        for request, own in zip(requests, shown, strict=True)
    ]
    backend = backend_of(given)
    backend.device(0)
    transport = InlineTransport()
    config = HfConfig(name="hf", dtype=given.dtype)
    with HfEngine.create(config, target, EngineContext(backend=backend, transport=transport)) as engine:
        by_hf = captured(engine, transport, schema, requests)
    begun = time.monotonic()
    context = EngineContext(
        backend=backend,
        placement="colocated",
        memory_fraction=0.1 if given.backend == "cuda" else None,
        start_s=given.start_s,
    )
    with new_engine(given, folder, target, context) as engine:
        engine.start(schema)
        start_s = time.monotonic() - begun
        by_engine = captured(engine, backend.transport("colocated"), schema, requests)
        again = captured(engine, backend.transport("colocated"), schema, requests[::-1])[::-1]
    rows = []
    for index, (request, own) in enumerate(zip(requests, shown, strict=True)):
        others = {0: None, 1: 2, 2: 1, 3: 4, 4: 3, 5: None}[index]
        row = {"images": len(own), "tokens": len(request.input_ids)}
        row["engine_to_float32"] = distance(by_engine[index], exact[index])
        row["again_to_float32"] = distance(again[index], exact[index])
        row["hf_to_float32"] = distance(by_hf[index], exact[index])
        row["engine_to_hf"] = distance(by_engine[index], by_hf[index])
        if others is not None:
            row["other_images"] = distance(exact[others], exact[index])
        if own:
            position_1T = torch.arange(len(request.input_ids))[None]
            wrong = reference_states(folder, request, own, position_ids=position_1T.expand(3, 1, -1))[
                :, first:
            ]
            row["index_positions"] = distance(wrong, exact[index])
        wrong = min(row.get(name, float("inf")) for name in ("other_images", "index_positions"))
        nearest = min(row["engine_to_float32"], row["again_to_float32"])
        farthest = max(row["engine_to_float32"], row["again_to_float32"])
        floor = 1e-4 if given.dtype == "float32" and given.backend == "cpu" else 5e-3
        row["ok"] = farthest <= max(MOST_TIMES * row["hf_to_float32"], floor)
        row["ok"] = row["ok"] and LEAST_TIMES * nearest < wrong
        rows.append(row)
    return {"start_s": start_s, "samples": rows, "ok": all(row["ok"] for row in rows)}


def new_engine(given, folder: Path, target, context):
    engine_type = plugins.load_available(Engine, given.engine)
    arguments = dict(ENGINE_ARGUMENTS[given.engine, given.backend])
    more = {}
    if given.engine == "vllm":
        more = {"dtype": given.dtype, "max_model_len": MAX_LENGTH, "kv_cache_bytes": 1 << 28}
        more["enforce_eager"] = True
        # Samples of equal ids and different images lie in the same blocks' places.
        arguments |= (
            {"enable_prefix_caching": True}
            if "qwen3_vl" in folder.name and not given.no_shared_prefixes
            else {}
        )
        if given.backend == "cpu":
            os.environ.update(variables(given, folder.with_name("capture")))
    else:
        more = {"dtype": given.dtype}
    config = engine_type.Config(name=given.engine, batch_tokens=BATCH_TOKENS, args=arguments, **more)
    return engine_type.create(config, target, context)


def distance(got_TNH: torch.Tensor, reference_TNH: torch.Tensor) -> float:
    """Return the largest relative distance of a layer's states."""
    apart_N = (got_TNH - reference_TNH).norm(dim=(0, 2)) / reference_TNH.norm(dim=(0, 2))
    return float(apart_N.max())


# Drafts.


def drafts(given, folder: Path) -> dict:
    with workers(given) as threads:
        plain = threads.submit(answers, given, folder, folder.with_name(f"{folder.name}-plain"), None)
        trained = {name: threads.submit(served, given, folder, name) for name in given.draft}
    texts, _, start_s = plain.result()
    found: dict = {"start_s": start_s, "prompts": len(texts)}
    for name, future in trained.items():
        try:
            draft, (drafted, noted, draft_start_s), accepted = future.result()
        except Exception as error:  # the other draft is kept
            log.exception("%s of %s", name, folder)
            found[name] = {"error": f"{type(error).__name__}: {error}"[-1500:], "ok": False}
            continue
        same = sum(a == b for a, b in zip(drafted, texts, strict=True))
        row = {"start_s": draft_start_s, "same_texts": same, "accepted": accepted}
        row["ok"] = same == len(texts) and accepted > 0
        if given.engine == "vllm":
            row |= compared(folder, draft, drafted, noted)
            enough = row["same_guesses"] >= LEAST_GUESSES[given.dtype] * row["rounds"]
            row["ok"] = row["ok"] and enough and row["rounds"] >= 10
        found[name] = row
    found["ok"] = all(found[name]["ok"] for name in trained)
    return found


def write_rows(given, target: Path) -> None:
    """Write rows of text with the target's greedy answers, and rows with an image each."""
    draw = random.Random(0)
    prompts = [[draw.randrange(256) for _ in range(4)] for _ in range(24)]
    context = EngineContext(backend=backend_of(given))
    with HfEngine.create(HfConfig(dtype="float32"), read_target(target), context) as engine:
        texts = engine.generate(prompts, SamplingParams(max_new_tokens=80, stop_at_eos=False))
    rows = []
    for prompt, text in zip(prompts, texts, strict=True):
        mask = [0] * len(prompt) + [1] * len(text.token_ids)
        rows.append({"input_ids": [*prompt, *text.token_ids], "loss_mask": mask})
    for seed in range(8):
        content = question(f"What is {seed}?", [picture(SIZES[seed % 4], seed)])
        rows.append({"messages": [content, {"role": "assistant", "content": f"A picture, number {seed}."}]})
    target.with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def served(given, target: Path, name: str):
    """Train a draft, serve it, and return its folder, the answers and the accepted guesses."""
    output = target.with_name(f"{target.name}-{name}")
    server = output.with_name(f"{output.name}-server")
    words = ["--target", target, "--data", target.with_suffix(".jsonl"), "--draft", name, "--output", output]
    settings = ["train.steps=80", "train.warmup_steps=5", "train.global_batch_tokens=1024"]
    settings.append("data.on_bad_row=skip")  # a random target may answer with tokens of images
    settings += [f"backend.name={given.backend}", "engine.dtype=float32"]
    start = "import sys; from spec_trainer.cli.app import run; sys.exit(run(sys.argv[1:]))"
    command = [sys.executable, "-c", start, *map(str, words), *DRAFTS[name], *settings]
    subprocess.run(command, check=True, stdout=sys.stderr, timeout=LIMIT_S)
    draft = output / "draft"
    found = answers(given, target, server, draft)
    metrics = (server / "metrics").read_text()
    counters = plugins.load_available(Engine, given.engine).serving.counters(metrics)
    return draft, found, counters.acceptance.accepted


def variables(given, folder: Path) -> dict[str, str]:
    """Return the environment of a server; that of vLLM has the rig that notes its guesses in ``folder``."""
    if given.engine == "sglang":
        return {}
    points = "[vllm.general_plugins]\nspec_rig = spec_vllm_rig:install\n"
    rig = write_distribution(folder / "rig", "spec-vllm-rig", points)
    if given.backend == "cpu":  # its only runner gives drafts the positions of the second one
        (folder / "drafts.positions").touch()
    paths = [TESTS / "vllm_rig", TESTS / "rig_streams", rig, os.environ.get("PYTHONPATH", "")]
    return SERVER_VARIABLES[given.backend] | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "SPEC_TEST_DRAFTS": str(folder / "drafts.jsonl"),
        "VLLM_NO_USAGE_STATS": "1",
    }


def answers(given, target: Path, folder: Path, draft: Path | None):
    """Return the prompts with their answers, what the server guessed for each, and the seconds of its start."""
    folder.mkdir(exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    flags = [f"--dtype={given.dtype}", f"--port={port}", "--host=127.0.0.1", *server_flags(given)]
    settings = [f"{name}={value}" for name, value in variables(given, folder).items()]
    command = shlex.join(
        ["exec", "env", *settings, sys.executable, *start_words(given, target, draft), *flags]
    )
    begun, server = time.monotonic(), ServerProcess(command, folder, port)
    try:
        server.wait_ready(given.start_s)
        start_s = time.monotonic() - begun
        notes, known, texts, guesses = folder / "drafts.jsonl", set(), [], []
        notes.touch()
        for number in range(PROMPTS):
            message = question(f"What is shown in {number}?", shown_in(number))
            texts.append(answer(given, server, target, message))
            guesses.append(noted(notes, known) if draft is not None and number < COMPARED_PROMPTS else [])
        (folder / "metrics").write_bytes(server.ask("GET", "/metrics")[2])
        return texts, guesses, start_s
    finally:
        server.close()


def server_flags(given) -> list[str]:
    if given.engine == "vllm":
        flags = [f"--max-model-len={MAX_LENGTH}", "--max-num-seqs=8", *VLLM_FLAGS[given.backend]]
        return [*flags, "--enforce-eager", "--no-enable-prefix-caching"]
    settings = ENGINE_ARGUMENTS[given.engine, given.backend] | {"disable_radix_cache": True}
    deterministic = ["--enable-deterministic-inference"] if given.backend == "cuda" else []
    words = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
        for name, value in settings.items()
    ]
    return [*words, "--enable-metrics", "--skip-server-warmup", "--max-running-requests=8", *deterministic]


def answer(given, server: ServerProcess, target: Path, message: dict):
    """Return the prompt's tokens and the answer's, from SGLang an empty prompt and the answer's text."""
    if given.engine == "vllm":
        return server.answer(target, message, NEW_TOKENS)
    fields = {"model": str(target), "messages": [message], "temperature": 0, "max_tokens": NEW_TOKENS}
    status, _, body = server.ask("POST", "/v1/chat/completions", fields | {"ignore_eos": True})
    assert status == 200, body
    found = json.loads(body)
    assert found["usage"]["completion_tokens"] == NEW_TOKENS
    return [], found["choices"][0]["message"]["content"]


def start_words(given, target: Path, draft: Path | None) -> list[str]:
    """Return the printed command without its program, for a machine on which vLLM's own script may be missing."""
    words = ["vllm", "serve", str(target)]
    if given.engine == "sglang":
        words = ["python", "-m", "sglang.launch_server", "--model-path", str(target)]
    elif given.backend == "cpu":
        words = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", str(target)]
    if draft is not None:
        spec, engine_type = read_target(target), plugins.load_available(Engine, given.engine)
        command = engine_type.serving.command(spec, recognise(draft, spec), draft, NUM_DRAFT_TOKENS)
        words = shlex.split(command)
    return ["-m", "vllm.entrypoints.cli.main", *words[1:]] if words[0] == "vllm" else words[1:]


def shown_in(number: int):
    return [picture(SIZES[(number + index) % len(SIZES)], number) for index in range(1 + number % 3)]


def noted(notes: Path, known: set[str]) -> list[tuple[int, ...]]:
    """Return the guesses for the request that the server answered last, round by round."""
    time.sleep(0.5)  # an answer may be there before the last guesses are written
    steps = [json.loads(line) for line in notes.read_text().splitlines()]
    found = [tuple(guesses) for step in steps for name, guesses in step.items() if name not in known]
    known.update(name for step in steps for name in step)
    return found


def compared(target: Path, draft: Path, texts, guesses) -> dict[str, int]:
    """Return in how many rounds the server's guesses are our proposer's."""
    steps = []
    for number, own in enumerate(guesses[:COMPARED_PROMPTS]):
        prompt, text = texts[number]
        request = CaptureRequest(request_id=0, input_ids=(*prompt, *text), destinations=())
        hidden_TNH = reference_states(target, request, shown_in(number))
        steps += Replay(target, draft, len(prompt), request.input_ids, hidden_TNH).steps(own)
    return {
        "rounds": len(steps),
        "same_guesses": sum(step.theirs == step.ours for step in steps),
        "same_first_guess": sum(step.theirs[:1] == step.ours[:1] for step in steps),
    }


if __name__ == "__main__":
    main()
