"""Check on a GPU the engine sglang; print one JSON document. It is no test: run it by hand.

::

    python -m benchmarks.gpu.sglang_capture --target DIR [--draft DIR --draft-tokens K] [--reference]

``--reference``: the states are compared with those of Transformers on the same GPU. Two prefill throughputs are told:
SGLang's own (plain mode, everything queued at once), and that of captures as a run dispatches them: two batches
ahead, a receiver that releases what it gets.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import threading
import time
from pathlib import Path

import torch
from tests.captured_states import captured

from spec_core import Backend, EngineContext, plugins
from spec_core.errors import PeerLost
from spec_core.records import CaptureRequest, FeatureSchema, SamplingParams
from spec_engine_hf.engine import HfConfig, HfEngine
from spec_engine_sglang.config import SglangConfig
from spec_engine_sglang.engine import SglangEngine
from spec_kit.streams.inline_transport import InlineTransport
from spec_kit.targets.target_reader import read_target

LIMIT_S = 600.0
WINDOW_BYTES = 4 << 30
AHEAD = 2
GPU_BOX = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "disable_radix_cache": True,
}


def main() -> None:
    words = argparse.ArgumentParser()
    words.add_argument("--target", type=Path, required=True)
    words.add_argument("--draft", type=Path)
    words.add_argument("--draft-tokens", type=int, default=3)
    words.add_argument("--reference", action="store_true")
    words.add_argument("--tokens", type=int, default=262144)
    words.add_argument("--length", type=int, default=1024)
    words.add_argument("--batch-tokens", type=int, default=8192)
    given = words.parse_args()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)

    target = read_target(given.target)
    middle = target.num_layers // 2
    layers = (2, middle, target.num_layers - 3, target.num_layers)
    schema = FeatureSchema(layers=layers, hidden_size=target.hidden_size, dtype=target.dtype)
    backend_type = plugins.load_available(Backend, "cuda")
    backend = backend_type(backend_type.Config(name="cuda"))
    context = EngineContext(backend=backend, placement="colocated", memory_fraction=0.8)
    config = SglangConfig(name="sglang", batch_tokens=given.batch_tokens, args=GPU_BOX)
    report: dict[str, object] = {"target": str(target.folder), "layers": layers}
    backend.device(0)
    with SglangEngine.create(config, target, context) as engine:
        prompts = random_prompts(target.vocab_size, given.tokens // given.length, given.length)
        report["capture"] = measure_capture(engine, backend, schema, prompts, given.batch_tokens)
        if given.reference:
            report["states"] = compare_states(engine, backend, schema)
        report["plain_prefill"] = measure_plain(engine, prompts)
        report["ratio"] = report["capture"]["tokens_per_s"] / report["plain_prefill"]["tokens_per_s"]
        if given.draft is not None:
            report["draft"] = decode(engine, given.draft, given.draft_tokens, prompts[:64])
    print(json.dumps(report, indent=2))


def random_prompts(vocab_size, count, length):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (count, length), generator=generator).tolist()


def measure_capture(engine, backend, schema, prompts, batch_tokens):
    per_batch = max(1, batch_tokens // len(prompts[0]))
    with backend.transport("colocated").listen(schema, WINDOW_BYTES) as receiver:
        requests = [
            CaptureRequest(request_id=i, input_ids=tuple(ids), destinations=(receiver.address,))
            for i, ids in enumerate(prompts)
        ]
        batches = [requests[i : i + per_batch] for i in range(0, len(requests), per_batch)]
        threading.Thread(target=drain, args=(receiver,), daemon=True).start()
        start = time.perf_counter()
        engine.start(schema)
        start_s = time.perf_counter() - start
        engine.capture(batches[0], schema).result(LIMIT_S)  # kernels are compiled
        start = time.perf_counter()
        running = []
        for batch in batches:
            if len(running) >= AHEAD:
                running.pop(0).result(LIMIT_S)
            running.append(engine.capture(batch, schema))
        for future in running:
            future.result(LIMIT_S)
        return {"start_s": start_s, **speed(prompts, time.perf_counter() - start)}


def drain(receiver):
    while True:
        try:
            receiver.release(receiver.receive(LIMIT_S))
        except PeerLost:
            return


def measure_plain(engine, prompts):
    prefill = SamplingParams(max_new_tokens=0)
    engine.generate(prompts[:8], prefill)
    start = time.perf_counter()
    engine.generate(prompts, prefill)
    return speed(prompts, time.perf_counter() - start)


def speed(prompts, seconds):
    tokens = sum(map(len, prompts))
    return {"tokens": tokens, "seconds": seconds, "tokens_per_s": tokens / seconds}


def compare_states(engine, backend, schema):
    """Largest difference per layer, as a share of the layer's largest value; bf16 rounds to 2^-8."""
    target = engine.target
    prompts = random_prompts(target.vocab_size, 1, 300) + random_prompts(target.vocab_size, 3, 17)
    requests = [CaptureRequest(request_id=0, input_ids=tuple(ids), destinations=()) for ids in prompts]
    ours = captured(engine, backend.transport("colocated"), schema, requests)
    transport = InlineTransport()
    with HfEngine.create(
        HfConfig(name="hf"), target, EngineContext(backend=backend, transport=transport)
    ) as hf:
        theirs = captured(hf, transport, schema, requests)
    worst = {}
    for place, layer in enumerate(schema.layers):
        shares = [
            float((ours[i][:, place] - theirs[i][:, place]).abs().max() / theirs[i][:, place].abs().max())
            for i in range(len(prompts))
        ]
        worst[layer] = max(shares)
    return worst


def decode(engine, draft, draft_tokens, prompts):
    prompts = [prompt[:64] for prompt in prompts]
    plain = SamplingParams(max_new_tokens=128, stop_at_eos=False)
    before = engine.generate(prompts, plain)
    engine.load_draft(draft)
    drafting = SamplingParams(max_new_tokens=128, stop_at_eos=False, num_draft_tokens=draft_tokens)
    after = engine.generate(prompts, drafting)
    counted = engine.acceptance()
    return {
        "acceptance_length": counted.acceptance_length,
        "acceptance_per_position": counted.acceptance_per_position,
        "rounds": counted.rounds,
        "texts_equal": sum(a.token_ids == b.token_ids for a, b in zip(before, after, strict=True)),
        "texts": len(prompts),
    }


if __name__ == "__main__":
    main()
