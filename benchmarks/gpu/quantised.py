"""Compare on a GPU features of a target in FP8 with references; print one JSON document. It is no test.

::

    python -m benchmarks.gpu.quantised --engine vllm --output DIR [--shape small]

Run it by hand, from the repository's root. The target is random (``benchmarks/random_target.py --fp8``): matrices in
8-bit floating point, with a scale per row, and activations that the engine rounds per token. A figure is the distance
of all samples' states at a layer, |a - b| / |b|:

- ``features_to_dequantised``: the engine's features, and Transformers in float32 with the dequantised weights.
- ``simulated_to_dequantised``: the same reference with what enters each matrix rounded to 8 bits per token, too. So
  much is explained by the rounding of activations.
- ``features_to_simulated``: what neither explains.
- ``bfloat16_to_dequantised``: the dequantised target by Transformers in bfloat16.
- ``features_to_original``: the target as it was before it was quantised.

``correlation`` is the cosine between the first two differences: near 0 if the rounding of activations explained
nothing. It is below 1, because bfloat16 moves about each twentieth value over a boundary of the rounding, by a step.

``ok``: features are at most ``MOST_TIMES`` as far from the dequantised reference as the simulation is, with a
correlation of ``LEAST_CORRELATION``, and farther from the original.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
import time
from pathlib import Path

import torch
from benchmarks.random_target import write_random_target
from tests.captured_states import captured
from tests.quantised_targets import distance, round_inputs, write_dequantised

from spec_core import Backend, Engine, EngineContext, plugins
from spec_core.records import CaptureRequest, FeatureSchema
from spec_kit.targets.target_reader import read_target
from spec_testing import TransformersTarget

from .images import device_name, versions

LIMIT_S = 300.0
LENGTHS = (5, 17, 64, 130, 257, 400)
MOST_TIMES = 1.3
LEAST_CORRELATION = 0.2
BATCH_TOKENS = 512
ARGUMENTS = {
    "vllm": {},
    "sglang": {
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "disable_cuda_graph": True,
        "disable_radix_cache": True,
        "max_total_tokens": 16384,
    },
}
VLLM = {"kv_cache_bytes": 1 << 28, "max_model_len": 1024, "enforce_eager": True}


def main() -> None:
    words = argparse.ArgumentParser()
    words.add_argument("--engine", choices=sorted(ARGUMENTS), nargs="+", required=True)
    words.add_argument("--output", type=Path, required=True)
    words.add_argument("--shape", default="small")
    words.add_argument("--backend", default="cuda")
    words.add_argument("--start-s", type=float, default=250.0, help="longest start of an engine")
    given = words.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    output = given.output.resolve()
    write = write_random_target
    original = write(given.shape, output / "original")
    quantised = write(given.shape, output / "fp8", fp8=True)
    dequantised = write_dequantised(quantised, output / "dequantised")
    target = read_target(quantised)
    layers = tuple(sorted({1, target.num_layers // 2, target.num_layers - 1, target.num_layers}))
    draw = random.Random(2)
    prompts = [[draw.randrange(target.vocab_size) for _ in range(length)] for length in LENGTHS]
    known = references(original, dequantised, prompts, layers)
    document = {"versions": versions(), "device": device_name(), "shape": given.shape, "layers": layers}
    for name in given.engine:
        begun = time.monotonic()
        features = joined(by_engine(given, name, quantised, prompts, layers))
        document[name] = {"seconds": time.monotonic() - begun, **compared(features, known, layers)}
        (output / "quantised.json").write_text(json.dumps(document, indent=1))
    document["ok"] = all(document[name]["ok"] for name in given.engine)
    print(json.dumps(document, indent=1))


def references(original: Path, dequantised: Path, prompts, layers) -> dict[str, torch.Tensor]:
    def states(model: TransformersTarget) -> torch.Tensor:
        return joined([model.hidden(ids)[:, list(layers)].float() for ids in prompts])

    found = {"original": states(TransformersTarget(original))}
    exact = TransformersTarget(dequantised)
    found["dequantised"] = states(exact)
    round_inputs(exact.model, to_integers=False)
    found["simulated"] = states(exact)
    rounded = TransformersTarget(dequantised)
    rounded.model.to(torch.bfloat16)
    found["bfloat16"] = states(rounded)
    return found


def joined(samples) -> torch.Tensor:
    return torch.cat(list(samples))


def by_engine(given, name: str, folder: Path, prompts, layers) -> list[torch.Tensor]:
    target = read_target(folder)
    schema = FeatureSchema(layers=layers, hidden_size=target.hidden_size, dtype="bfloat16")
    backend_type = plugins.load_available(Backend, given.backend)
    backend = backend_type(backend_type.Config(name=given.backend))
    backend.device(0)
    context = EngineContext(
        backend=backend,
        placement="colocated",
        memory_fraction=0.2 if given.backend == "cuda" else None,
        start_s=given.start_s,
    )
    engine_type = plugins.load_available(Engine, name)
    more = VLLM if name == "vllm" else {}
    config = engine_type.Config(name=name, batch_tokens=BATCH_TOKENS, args=ARGUMENTS[name], **more)
    requests = [
        CaptureRequest(request_id=index, input_ids=tuple(ids), destinations=())
        for index, ids in enumerate(prompts)
    ]
    with engine_type.create(config, target, context) as engine:
        engine.start(schema)
        return captured(engine, backend.transport("colocated"), schema, requests)


def compared(features: torch.Tensor, known: dict[str, torch.Tensor], layers) -> dict:
    def at(layer: int, got: str, reference: str) -> float:
        states = known | {"features": features}
        return distance(states[got][:, layer], states[reference][:, layer])

    pairs = [("features", "dequantised"), ("simulated", "dequantised"), ("features", "simulated")]
    pairs += [("bfloat16", "dequantised"), ("features", "original"), ("dequantised", "original")]
    rows = {}
    for index, layer in enumerate(layers):
        row = rows[layer] = {f"{got}_to_{reference}": at(index, got, reference) for got, reference in pairs}
        exact = known["dequantised"][:, index]
        apart = [states[:, index] - exact for states in (features, known["simulated"])]
        row["correlation"] = float(torch.cosine_similarity(*(one.flatten() for one in apart), dim=0))
        row["ok"] = (
            row["features_to_dequantised"] <= MOST_TIMES * row["simulated_to_dequantised"]
            and row["correlation"] >= LEAST_CORRELATION
            and row["features_to_dequantised"] < row["features_to_original"]
        )
    return {"layers": rows, "ok": all(row["ok"] for row in rows.values())}


if __name__ == "__main__":
    main()
