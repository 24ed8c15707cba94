"""Fresh draft weights in a stock SGLang server on a GPU; prints one JSON document. Not a test: run it by hand.

::

    python -m benchmarks.gpu.sglang_updates --target DIR --draft DFLASH_DIR EAGLE3_DIR --output DIR

For each draft a server starts as a user starts it, and answers greedy requests all the time. The draft and a copy of
it with noise are pushed in turn. What is looked at: no request fails; every token of every text is the target's own
choice, within rounding (scored by the next Eagle3 server's prefill: SGLang scores nothing with DFlash); the draft's
tensors and guesses after a commit are those of the server that has just read the folder; a damaged push leaves the
old draft; no tensor of the target changes; the longest gap between two tokens with and without pushes. ``--output``
keeps the document after each phase, and the servers' logs.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import logging
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tests.distributions import write_distribution

from spec_core import Backend, plugins
from spec_core.errors import EngineError
from spec_kit.hosting import DRAFT_TOKEN_VARIABLE, HttpReplica
from spec_kit.targets import read_target
from spec_kit.weight_sync import Publisher, open_weight_transports
from spec_trainer.cli.app import run

log = logging.getLogger("updates")

SGLANG_RIG = Path(__file__).parents[2] / "tests" / "engines" / "sglang_rig"
TOKEN = "of the measurement"
LIMIT_S = 60.0
DRAFT_TOKENS = 3
ALGORITHMS = {"LlamaForCausalLMEagle3": ("EAGLE3", DRAFT_TOKENS), "DFlashDraftModel": ("DFLASH", 1)}
"""SGLang's name of each architecture, and its number of steps."""
STREAMS = 6
NEW_TOKENS = 96
ROUNDED = 0.15
"""Largest gap in log-probability between the target's choice and one that bfloat16 may make instead."""
GRAPHS = ["--cuda-graph-max-bs-decode", "8", "--disable-prefill-cuda-graph"]
NO_GRAPHS = ["--disable-decode-cuda-graph", "--disable-prefill-cuda-graph"]


def main() -> None:
    words = argparse.ArgumentParser()
    words.add_argument("--target", type=Path, required=True)
    words.add_argument("--draft", type=Path, nargs="+", required=True)
    words.add_argument("--output", type=Path, required=True)
    words.add_argument("--pushes", type=int, default=5, help="of each of the two versions, one a second")
    words.add_argument("--quiet-s", type=float, default=8.0)
    words.add_argument("--start-s", type=float, default=250.0, help="longest start of a server")
    words.add_argument(
        "--limit-s", type=float, default=520.0, help="no draft is begun with less than 150 s left"
    )
    words.add_argument("--no-graphs", action="store_true")
    words.add_argument("--backend", default="cuda")
    words.add_argument("words", nargs="*", help="of the server: -- --mem-fraction-static 0.5 …")
    given = words.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    os.environ[DRAFT_TOKEN_VARIABLE] = TOKEN
    begun = time.monotonic()
    document: dict[str, dict] = {}
    unscored: dict[str, tuple] = {}
    for folder in given.draft:
        if time.monotonic() - begun > given.limit_s - 150.0:
            document[str(folder)] = {"left_out": "no time was left"}
            continue
        found = document[str(folder)] = {}
        try:
            measure(given, folder, found, unscored, lambda: save(given.output, document))
        except Exception as error:  # the next draft is measured all the same
            log.exception("%s", folder)
            found["error"] = f"{type(error).__name__}: {error}"
        save(given.output, document)
    print(json.dumps(document, indent=2))


def save(output, document):
    (output / "sglang-updates.json").write_text(json.dumps(document, indent=2))


def measure(given, folder, found, unscored, keep):
    folder = folder.resolve()
    output = given.output.resolve() / folder.parent.name
    output.mkdir(parents=True, exist_ok=True)
    worse = with_noise(folder, output / "worse")
    with serving(given, folder, output, found) as server:
        keep()
        prompts = random_prompts(read_target(given.target).vocab_size, STREAMS)
        server.generate(prompts[0])  # kernels are compiled
        fresh = guesses(server, prompts)
        found["fresh"] = told(fresh)
        with Pushes(given.backend, given.target, server, folder, worse) as pushes:
            first = pushes.push(worse, "file")
            noisy = guesses(server, prompts)
            back = pushes.push(folder, "ipc")
            again = guesses(server, prompts)
            pushes.push(worse, "ipc")
            pushes.publisher.revert().result(LIMIT_S)
            reverted = guesses(server, prompts)
            found["first_pushes"] = [first, back]
            found |= {"noisy": told(noisy), "again": told(again), "reverted": told(reverted)}
            found["checks"] = {
                "noise is guessed otherwise": noisy != fresh,
                "guesses after a push are those of a fresh server": again == fresh,
                "guesses after a revert are those of before": reverted == again,
                "a damaged push is refused": pushes.damaged(worse),
                "guesses stay after it": guesses(server, prompts) == again,
            }
            keep()
            with server.load(prompts) as load:
                time.sleep(1.0)
                quiet = window(given.quiet_s)
                for number in range(2 * given.pushes):  # with digests
                    began = time.monotonic()
                    pushes.push(worse if number % 2 == 0 else folder, "ipc")
                    time.sleep(max(0.0, began + 1.0 - time.monotonic()))
                server.without_notes()
                time.sleep(1.0)
                rows, start = [], time.monotonic()
                for number in range(2 * given.pushes):
                    began = time.monotonic()
                    rows.append(pushes.push(worse if number % 2 == 0 else folder, "ipc"))
                    time.sleep(max(0.0, began + 1.0 - time.monotonic()))
                pushed = start, time.monotonic()
            found |= load.found(quiet, pushed)
            found["pushes"] = rows
            found["status"] = server.ask("GET", "/spec/draft/status", token=TOKEN)[1]
            keep()
        with contextlib.redirect_stdout(sys.stderr):
            target, to = ["--target", str(given.target)], ["--to", server.url]
            pushed = run(["push", "--draft-model", str(folder), *target, *to])
            served = run(["serving", "--of", server.url])
        found["checks"]["the commands push and show"] = (pushed, served) == (0, 0)
        found |= server.digests()
        fresh_digest = found["digests_of_live"][0]
        found["checks"] |= {
            "no request failed": not load.failures,
            "all pushes were committed": all(row["committed"] for row in [first, back, *rows]),
            "one digest of the target": len(set(found["digests_of_target"])) == 1,
            "the draft's tensors after a push are those of a fresh server": found["digests_of_live"][2]
            == fresh_digest,
            "answers name the pushed versions": len(load.versions) > 1 and 0 not in load.versions,
        }
        unscored[str(folder)] = load.texts, found
        if server.scores:
            for texts, part in unscored.values():
                part["texts"] = scored = server.score(texts)
                part["checks"]["every token is the target's choice"] = scored["largest_gap"] <= ROUNDED
            unscored.clear()
        keep()


class Pushes:
    """A publisher to one server, whose next version is one higher each time."""

    def __init__(self, backend, target, server, folder, worse):
        backend_type = plugins.load_available(Backend, backend)
        self._backend = backend_type(backend_type.Config(name=backend))
        self._device = self._backend.device(0)
        self._tensors = {path: load_file(path / "model.safetensors") for path in (folder, worse)}
        self._versions = itertools.count(1)
        self._digest, self._server = read_target(target).digest, server
        self._by = ""
        self.publisher = None

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.publisher.close()

    def _open(self, by):
        """Have a publisher with one transport; closing one closes its transports."""
        if self._by == by:
            return
        if self.publisher is not None:
            self.publisher.close()
        self._transports = open_weight_transports(self._backend, [by])
        self.publisher = Publisher(self._transports, self._digest, device=self._device)
        self.publisher.add("server", HttpReplica(self._server.url, TOKEN)).result(LIMIT_S)
        self._by = by

    def push(self, folder, by):
        self._open(by)
        tensors = self._tensors[folder]
        if by == "ipc":
            tensors = {name: tensor.to(self._device) for name, tensor in tensors.items()}
        began = time.monotonic()
        report = self.publisher.publish(next(self._versions), tensors).result(LIMIT_S)
        (outcome,) = report.replicas.values()
        row = {"version": report.version, "committed": report.committed, "by": by}
        row |= {"seconds": time.monotonic() - began, "parts": dict(outcome.seconds), "reason": outcome.reason}
        log.info("%s", row)
        return row

    def damaged(self, folder):
        """Return whether a push one of whose bytes has changed on the way is refused."""
        self._open("file")
        send = self._transports["file"].sender

        def damaged(manifest, weights, *others):
            changed = weights["fc.weight"].clone()
            changed.view(torch.uint8)[-1, -1] ^= 1
            return send(manifest, {**weights, "fc.weight": changed}, *others)

        self._transports["file"].sender = damaged
        try:
            return not self.push(folder, "file")["committed"]
        finally:
            self._transports["file"].sender = send


class Server:
    """``python -m sglang.launch_server`` with this project's plugin installed, and a rig that notes digests."""

    def __init__(self, target, draft, output, words):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            self.port = taken.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log, self._notes = output / "server.log", output / "swaps.jsonl"
        (architecture,) = json.loads((draft / "config.json").read_text())["architectures"]
        algorithm, steps = ALGORITHMS[architecture]
        self.scores = algorithm != "DFLASH"
        flags = {
            "model-path": target,
            "host": "127.0.0.1",
            "port": self.port,
            "dtype": "bfloat16",
            "attention-backend": "triton",
            "sampling-backend": "pytorch",
            "mem-fraction-static": 0.3,
            "max-running-requests": 8,
            "speculative-algorithm": algorithm,
            "speculative-draft-model-path": draft,
            "speculative-num-steps": steps,
            "speculative-eagle-topk": 1,
            "speculative-num-draft-tokens": DRAFT_TOKENS + 1,
        }
        flags = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        switches = ["--skip-tokenizer-init", "--skip-server-warmup", "--disable-radix-cache"]
        points = "[sglang.srt.plugins]\nspec_rig = spec_sglang_rig:install\n"
        rig = write_distribution(output / "rig", "spec-sglang-rig", points)
        paths = [SGLANG_RIG, rig, os.environ.get("PYTHONPATH", "")]
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "SPEC_TEST_SWAPS": str(self._notes),
            DRAFT_TOKEN_VARIABLE: TOKEN,
        }
        command = [sys.executable, "-m", "sglang.launch_server", *flags, *switches, *words]
        with self.log.open("w") as to:
            self._process = subprocess.Popen(
                command, env=env, stdout=to, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait_ready(self, limit_s):
        deadline = time.monotonic() + limit_s
        while True:
            with suppress(OSError, http.client.HTTPException):
                if self.ask("GET", "/health")[0] == 200:
                    return
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise EngineError(f"the server did not start: {self.log.read_text()[-2000:]}")
            time.sleep(0.5)

    def ask(self, method, path, fields=None, token=""):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        try:
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
            connection.request(method, path, None if fields is None else json.dumps(fields), headers)
            answer = connection.getresponse()
            body = answer.read()
            return answer.status, json.loads(body) if body[:1] in b"{[" and body else body.decode()
        finally:
            connection.close()

    def generate(self, prompt):
        status, answer = self.ask("POST", "/generate", request(prompt))
        assert status == 200, answer
        return answer

    @contextmanager
    def load(self, prompts):
        load = Load(self.port)
        threads = [threading.Thread(target=load.stream, args=(prompt,)) for prompt in prompts]
        for thread in threads:
            thread.start()
        try:
            yield load
        finally:
            load.over.set()
            for thread in threads:
                thread.join()

    def score(self, texts):
        """Return by how much each token's log-probability falls short of the target's best at its place."""
        gaps, different = [], 0
        for prompt, answers in texts.items():
            different += len(answers) > 1
            for text in answers:
                ids = [*prompt, *text]
                fields = {
                    "input_ids": ids,
                    "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
                    "return_logprob": True,
                    "logprob_start_len": 0,
                    "top_logprobs_num": 1,
                }
                about = self.ask("POST", "/generate", fields)[1]["meta_info"]
                given, best = about["input_token_logprobs"], about["input_top_logprobs"]
                gaps += [best[place][0][0] - given[place][0] for place in range(len(prompt), len(ids))]
        return {
            "prompts": len(texts),
            "prompts_with_several_texts": different,
            "tokens": len(gaps),
            "largest_gap": max(gaps),
            "gaps_above_0.02": sum(gap > 0.02 for gap in gaps),
        }

    def without_notes(self):
        self._notes.with_suffix(".off").touch()

    def digests(self):
        lines = [json.loads(line) for line in self._notes.read_text().splitlines()]
        return {
            "digests_of_target": [copy["target"] for line in lines for copy in line],
            "digests_of_live": [lines[0][0]["live"], *(after["live"] for _, after in lines)],
        }

    def close(self):
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(15)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextmanager
def serving(given, draft, output, found):
    """Start a server with CUDA graphs, or, where that fails, without."""
    for words in [NO_GRAPHS] if given.no_graphs else [GRAPHS, NO_GRAPHS]:
        began = time.monotonic()
        server = Server(given.target.resolve(), draft, output, [*words, *given.words])
        try:
            server.wait_ready(given.start_s)
        except EngineError as error:
            server.close()
            if words is NO_GRAPHS:
                raise
            shutil.copy(server.log, output / "server-with-graphs.log")
            found["start_with_graphs"] = str(error)[-600:]
            continue
        found |= {"start_s": time.monotonic() - began, "graphs": words is GRAPHS}
        log.info("%s: ready after %.0f s, graphs %s", draft, found["start_s"], found["graphs"])
        try:
            yield server
        finally:
            server.close()
        return


class Load:
    """Greedy streams without a pause: times of their tokens, their texts, and the versions that answers name."""

    def __init__(self, port):
        self._port = port
        self.over, self.failures = threading.Event(), []
        self.times: list[list[float]] = []
        self.texts: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
        self.versions: set[int] = set()

    def stream(self, prompt):
        texts = self.texts.setdefault(tuple(prompt), set())
        while not self.over.is_set():
            try:
                texts.add(self._answer(prompt))
            except Exception as error:  # noqa: BLE001 (every failure is counted)
                self.failures.append(f"{type(error).__name__}: {error}")
                time.sleep(0.1)

    def _answer(self, prompt):
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=LIMIT_S)
        times: list[float] = []
        self.times.append(times)
        try:
            fields = json.dumps({**request(prompt), "stream": True})
            connection.request("POST", "/generate", fields, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            self.versions.add(int(answer.getheader("x-draft-version") or 0))
            last, is_whole = None, False
            for line in answer:
                if line.startswith(b"data: {"):
                    times.append(time.monotonic())
                    last = line
                is_whole = is_whole or line.startswith(b"data: [DONE]")
            ids = json.loads(last[6:])["output_ids"]
            if answer.status != 200 or not is_whole or len(ids) != NEW_TOKENS:
                raise EngineError(f"status {answer.status}, {len(ids)} tokens")
            return tuple(ids)
        finally:
            connection.close()

    def found(self, quiet, pushed):
        return {
            "requests": len(self.times),
            "failed": self.failures[:5],
            "versions_in_answers": sorted(self.versions),
            "gaps_without_pushes": self._gaps(*quiet),
            "gaps_with_pushes": self._gaps(*pushed),
        }

    def _gaps(self, start, stop):
        found = sorted(
            after - before
            for times in self.times
            for before, after in itertools.pairwise(times)
            if start <= before and after <= stop
        )
        shares = {"median_ms": 0.5, "p99_ms": 0.99, "p999_ms": 0.999}
        told = {name: 1e3 * found[int(share * (len(found) - 1))] for name, share in shares.items()}
        return {"gaps": len(found), **told, "longest_ms": [1e3 * gap for gap in found[-5:]]}


def request(prompt):
    sampling = {"max_new_tokens": NEW_TOKENS, "temperature": 0.0, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": sampling}


def guesses(server, prompts):
    """Return, for each prompt alone, its text and how many verifications accepted 0, 1, … guesses."""
    answers = [server.generate(prompt) for prompt in prompts]
    about = [answer["meta_info"].get("spec_correct_drafts_histogram") for answer in answers]
    return [(answer["output_ids"], histogram) for answer, histogram in zip(answers, about, strict=True)]


def told(found):
    accepted = [histogram or [0] for _, histogram in found]
    rounds = sum(map(sum, accepted))
    lengths = sum(count * number for histogram in accepted for count, number in enumerate(histogram))
    return {"rounds": rounds, "acceptance_length": 1 + lengths / max(rounds, 1), "histograms": accepted}


def random_prompts(vocab_size, count):
    draw = random.Random(0)
    return [[draw.randrange(3, vocab_size) for _ in range(16)] for _ in range(count)]


def with_noise(folder, to):
    shutil.copytree(folder, to, dirs_exist_ok=True)
    draw = torch.Generator().manual_seed(1)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=draw, dtype=torch.float32).to(tensor.dtype)
            tensors[name] = tensor + 0.3 * tensor.float().std().nan_to_num(0.1).to(tensor.dtype) * noise
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to.resolve()


def window(seconds):
    start = time.monotonic()
    time.sleep(seconds)
    return start, time.monotonic()


if __name__ == "__main__":
    main()
