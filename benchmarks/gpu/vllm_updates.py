"""Fresh draft weights in a stock vLLM server on a GPU; prints one JSON document. Not a test: run it by hand.

::

    python -m benchmarks.gpu.vllm_updates --target DIR --draft DFLASH_DIR EAGLE3_DIR --output DIR

For each draft a server starts as a user starts it, with CUDA graphs, from a copy of the draft with noise; the draft
itself is pushed to it, then the noise again, then a revert and a damaged push. What is looked at, by prompts one at a
time: the guesses after each commit are, round by round, those of a **fresh** server that was started from the same
folder; the same text comes out with every draft, or at least tokens that the target itself would choose (scored by
Transformers in float32); no tensor of the target changes. ``--eager`` starts a third server without graphs from the
draft and compares its guesses. ``--output`` keeps the document after each phase, and the servers' logs.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from tests.distributions import write_distribution

from spec_core.errors import EngineError
from spec_kit.hosting import DRAFT_TOKEN_VARIABLE
from spec_kit.targets import read_target

from .sglang_updates import Pushes, random_prompts, with_noise

log = logging.getLogger("updates")

TOKEN = "of the measurement"
METHODS = {"LlamaForCausalLMEagle3": "eagle3", "DFlashDraftModel": "dflash", "Qwen3DSparkModel": "dspark"}
DRAFT_TOKENS = 3
NEW_TOKENS = 64
NUM_PROMPTS = 6
ANSWER_S = 120.0
RIG = Path(__file__).parents[2] / "tests" / "engines" / "vllm_rig"
STREAMS = Path(__file__).parents[2] / "tests" / "engines" / "rig_streams"


def main() -> None:
    words = argparse.ArgumentParser()
    words.add_argument("--target", type=Path, required=True)
    words.add_argument("--draft", type=Path, nargs="+", required=True)
    words.add_argument("--output", type=Path, required=True)
    words.add_argument("--start-s", type=float, default=250.0, help="longest start of a server")
    words.add_argument("--backend", default="cuda")
    words.add_argument("--transport", default="ipc")
    words.add_argument("--dtype", default="bfloat16")
    words.add_argument("--eager", action="store_true")
    words.add_argument("words", nargs="*", help="of the server: -- --gpu-memory-utilization 0.3 …")
    given = words.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    os.environ[DRAFT_TOKEN_VARIABLE] = TOKEN
    document: dict[str, dict] = {}
    for folder in given.draft:
        found = document[str(folder)] = {}
        try:
            measure(given, folder.resolve(), found)
        except Exception as error:  # the next draft is measured all the same
            log.exception("%s", folder)
            found["error"] = f"{type(error).__name__}: {error}"
        (given.output / "vllm-updates.json").write_text(json.dumps(document, indent=2))
    print(json.dumps(document, indent=2))


def measure(given, folder, found):
    output = given.output.resolve() / folder.parent.name
    output.mkdir(parents=True, exist_ok=True)
    worse = with_noise(folder, output / "worse")
    prompts = random_prompts(read_target(given.target).vocab_size, NUM_PROMPTS)
    with serving(given, worse, output / "pushed") as server:
        seen = {"noise": server.answers(prompts)}
        with Pushes(given.backend, given.target, server, folder, worse) as pushes:
            rows = [pushes.push(folder, given.transport)]
            seen["draft"] = server.answers(prompts)
            rows.append(pushes.push(worse, given.transport))
            seen["noise again"] = server.answers(prompts)
            pushes.publisher.revert().result(ANSWER_S)
            seen["reverted"] = server.answers(prompts)
            is_refused = pushes.damaged(worse)
            seen["after the damaged"] = server.answers(prompts)
        target_digests = server.target_digests()
        found["start_s"] = server.start_s
    with serving(given, folder, output / "fresh") as server:
        fresh = server.answers(prompts)
    found["pushes"] = rows
    found["checks"] = {
        "all pushes were committed": all(row["committed"] for row in rows),
        "noise is guessed otherwise": guesses(seen["noise"]) != guesses(fresh),
        "guesses after a push are those of a fresh server": guesses(seen["draft"]) == guesses(fresh),
        "guesses with the noise again are those of before": guesses(seen["noise again"])
        == guesses(seen["noise"]),
        "guesses after a revert are those of a fresh server": guesses(seen["reverted"]) == guesses(fresh),
        "a damaged push is refused": is_refused,
        "guesses stay after it": guesses(seen["after the damaged"]) == guesses(fresh),
        "one digest of the target": len(set(target_digests)) == 1,
    }
    seen["fresh"] = fresh
    if given.eager:
        with serving(given, folder, output / "eager", "--enforce-eager") as server:
            seen["eager"] = server.answers(prompts)
    found["of_a_fresh_server"] = {name: shares(answers, fresh) for name, answers in seen.items()}
    found["target_digests"] = len(target_digests)
    found["texts"] = score(given.target, prompts, seen)


def guesses(answers):
    return [rounds for _, rounds in answers]


def shares(answers, fresh):
    """Return how many rounds and texts of some answers are those of the fresh server."""
    pairs = [
        pair
        for (_, ours), (_, theirs) in zip(answers, fresh, strict=True)
        for pair in zip(ours, theirs, strict=False)
    ]
    return {
        "rounds": sum(len(rounds) for _, rounds in answers),
        "same_guesses": sum(ours == theirs for ours, theirs in pairs) / max(1, len(pairs)),
        "same_texts": sum(ours == theirs for (ours, _), (theirs, _) in zip(answers, fresh, strict=True)),
    }


def score(target, prompts, seen):
    """Return by how much tokens of all texts fall short of the target's best logit, in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    gaps: list[float] = []
    texts = {
        (tuple(prompt), tuple(text))
        for answers in seen.values()
        for prompt, (text, _) in zip(prompts, answers, strict=True)
    }
    with torch.no_grad():
        for prompt, text in texts:
            logits = model(torch.tensor([[*prompt, *text]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            chosen = logits.gather(1, torch.tensor(text)[:, None])[:, 0]
            gaps += (logits.max(-1).values - chosen).tolist()
    return {"texts": len(texts), "prompts": len(prompts), "tokens": len(gaps), "largest_gap": max(gaps)}


class Server:
    """``vllm serve`` with the documented flags, and the rig that notes guesses and digests of the target."""

    def __init__(self, given, draft, output, words):
        output.mkdir(parents=True, exist_ok=True)
        self._drafts, self._swaps = output / "drafts.jsonl", output / "swaps.jsonl"
        for file in (self._drafts, self._swaps):
            file.unlink(missing_ok=True)
        with socket.create_server(("127.0.0.1", 0)) as taken:
            self.port = taken.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        (architecture,) = json.loads((draft / "config.json").read_text())["architectures"]
        speculation = {
            "method": METHODS[architecture],
            "model": str(draft),
            "num_speculative_tokens": DRAFT_TOKENS,
        }
        flags = {
            "model": given.target.resolve(),
            "host": "127.0.0.1",
            "port": self.port,
            "dtype": given.dtype,
            "max-model-len": 256,
            "max-num-seqs": 4,
            "speculative-config": json.dumps(speculation),
            "worker-extension-cls": "spec_engine_vllm.worker_extension.WorkerExtension",
            "middleware": "spec_engine_vllm.draft_routes.DraftRoutes",
        }
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))] + words
        switches = ["--tokens-only", "--no-enable-prefix-caching"]
        points = "[vllm.general_plugins]\nspec_rig = spec_vllm_rig:install\n"
        rig = write_distribution(output / "rig", "spec-vllm-rig", points)
        paths = [RIG, STREAMS, rig, os.environ.get("PYTHONPATH", "")]
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "SPEC_TEST_DRAFTS": str(self._drafts),
            "SPEC_TEST_SWAPS": str(self._swaps),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
        }
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words, *switches]
        self.log = output / "server.log"
        self._begun_s = time.monotonic()
        self.start_s = 0.0
        with self.log.open("w") as to:
            self._process = subprocess.Popen(
                command, env=env, stdout=to, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait_ready(self, limit_s):
        while True:
            with suppress(OSError):
                if ask(self.port, "GET", "/health")[0] == 200:
                    self.start_s = time.monotonic() - self._begun_s
                    log.info("ready after %.0f s", self.start_s)
                    return
            if self._process.poll() is not None or time.monotonic() > self._begun_s + limit_s:
                raise EngineError(f"the server did not start: {self.log.read_text()[-2000:]}")
            time.sleep(0.5)

    def answers(self, prompts):
        """Return, for each prompt alone, its greedy text and the guesses of each round."""
        return [self._answer(prompt) for prompt in prompts]

    def _answer(self, prompt):
        already = len(self._drafts.read_text().splitlines()) if self._drafts.exists() else 0
        sampling = {"max_tokens": NEW_TOKENS, "temperature": 0.0, "ignore_eos": True}
        fields = {"token_ids": prompt, "sampling_params": sampling}
        status, body = ask(self.port, "POST", "/inference/v1/generate", fields)
        if status != 200:
            raise EngineError(f"status {status}: {body[:200]!r}")
        lines = self._drafts.read_text().splitlines()[already:]
        rounds = [guessed for line in lines for guessed in json.loads(line).values()]
        return json.loads(body)["choices"][0]["token_ids"], rounds

    def target_digests(self):
        return list(itertools.chain(*map(json.loads, self._swaps.read_text().splitlines())))

    def close(self):
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(15)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextmanager
def serving(given, draft, output, *words):
    shutil.rmtree(output, ignore_errors=True)
    server = Server(given, draft, output, [*words, *given.words])
    try:
        server.wait_ready(given.start_s)
        yield server
    finally:
        server.close()


def ask(port, method, path, fields=None, limit_s=ANSWER_S):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=limit_s)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request(method, path, None if fields is None else json.dumps(fields), headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


if __name__ == "__main__":
    main()
