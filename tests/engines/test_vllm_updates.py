"""Fresh weights reach the draft of a vLLM that serves: one that a run has started, and one that a user has."""

import itertools
import json
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spec_backend_cpu.backend import CpuBackend
from spec_core import Engine, WeightTransport
from spec_core.errors import EngineError
from spec_core.records import SamplingParams
from spec_engine_vllm.engine import VllmEngine
from spec_kit.hosting import HttpReplica
from spec_kit.targets import read_target
from spec_kit.weight_sync import Publisher, PublishReport, open_weight_transports

from .conftest import NUM_DRAFT_TOKENS, Trained
from .page_server import PageServer, shell_block
from .vllm_here import needs_vllm

pytestmark = [*needs_vllm, pytest.mark.xdist_group("updates")]

DRAFTED = SamplingParams(max_new_tokens=60, num_draft_tokens=NUM_DRAFT_TOKENS, stop_at_eos=False)
LIMIT_S = 120.0
HEAD = "lm_head.weight"
PROMPTS = slice(3)
NUM_PUSHES = 4
"""Pushes of each of two drafts, one a second."""
VERSIONS = itertools.count(1)
DRAFTS = ["eagle3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dflash", "peagle"))]
PUSHED_ONLY = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("eagle3, two layers, window", "eagle3, mla", "dflash, reduced", "mtp")
]
"""Drafts that only the test of many pushes has."""

Drafts = list[list[list[int]]]
"""The tokens that were drafted, for each prompt and round."""


@pytest.fixture(scope="module", params=DRAFTS)
def trained(request, trained_draft) -> Trained:
    return trained_draft(request.param)


@pytest.fixture(scope="module")
def worse(trained, tmp_path_factory) -> Path:
    """The trained draft with noise as large as its weights: next to no guess of it is right. Copies stay copies.

    The head of a block draft is made of rows of the target's head, and stays so.
    """
    folder = tmp_path_factory.mktemp(f"worse-{trained.name}") / "draft"
    shutil.copytree(trained.folder, folder)
    tensors = weights_of(folder)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not (name == HEAD and trained.name.startswith("dflash")):
            draw = torch.Generator().manual_seed(tensor.numel())
            noise = torch.randn(tensor.shape, generator=draw)
            tensors[name] = tensor + tensor.std().nan_to_num(0.1) * noise
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def transports() -> dict[str, WeightTransport]:
    return open_weight_transports(CpuBackend(CpuBackend.Config()), ["file"])


@pytest.fixture(scope="module")
def publisher(trained, transports) -> Iterator[Publisher]:
    with Publisher(transports, read_target(trained.target).digest) as publisher:
        yield publisher


@pytest.fixture(scope="module")
def serving(vllm_environment, trained, worse, config, vllm_context, publisher) -> Iterator[VllmEngine]:
    """vLLM with the worse draft, known to the publisher."""
    with VllmEngine.create(config, read_target(trained.target), vllm_context) as engine:
        with pytest.raises(EngineError, match="has no draft whose weights"):
            engine.draft_replica()
        engine.load_draft(worse)
        with pytest.raises(EngineError, match="serves no draft now"):
            engine.draft_replica().status().result(LIMIT_S)
        engine.generate(trained.prompts[:1], DRAFTED)
        publisher.add(trained.name, engine.draft_replica()).result(LIMIT_S)
        yield engine
        publisher.remove(trained.name).result(LIMIT_S)


def push(publisher: Publisher, folder: Path) -> PublishReport:
    return publisher.publish(next(VERSIONS), weights_of(folder)).result(LIMIT_S)


def weights_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


class Notes:
    """Notes that the rig writes in vLLM's processes."""

    def __init__(self, file: Path) -> None:
        self._drafts, self._swaps = file, file.with_name("swaps.jsonl")
        self._already = len(self._swaps.read_text().splitlines()) if self._swaps.exists() else 0
        """Swaps of other tests, which may have another target."""

    def drafted(self, engine: Engine, prompts: list[list[int]]) -> tuple[list[tuple[int, ...]], Drafts]:
        """Return text and drafts of each prompt, one after the other."""
        texts, drafts = [], []
        for prompt in prompts:
            already = len(self._drafts.read_text().splitlines()) if self._drafts.exists() else 0
            (answer,) = engine.generate([prompt], DRAFTED)
            lines = self._drafts.read_text().splitlines()[already:]
            texts.append(answer.token_ids)
            drafts.append([guesses for line in lines for guesses in json.loads(line).values()])
        return texts, drafts

    def target_digests(self) -> set[str]:
        lines = self._swaps.read_text().splitlines()[self._already :]
        return {digest for line in lines for digest in json.loads(line)}

    def plant(self, *fault: object) -> None:
        self._swaps.with_suffix(".fault").write_text(json.dumps(fault))


@pytest.fixture
def notes(draft_notes) -> Notes:
    return Notes(draft_notes)


@contextmanager
def generating(engine: Engine, prompts: list[list[int]]) -> Iterator[list[list[tuple[int, ...]]]]:
    """Generate all the time; the texts are in the list at the end."""
    over, rounds = threading.Event(), []

    def run() -> None:
        while not over.is_set():
            rounds.append([answer.token_ids for answer in engine.generate(prompts, DRAFTED)])

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield rounds
    finally:
        over.set()
        thread.join()


@pytest.mark.timeout(900)  # trains, and starts two vLLMs
@pytest.mark.parametrize("trained", [*DRAFTS, *PUSHED_ONLY], indirect=True)
def test_pushes_every_second_change_what_is_drafted_and_no_answer(
    trained, worse, serving, sharing_engine, publisher, notes
) -> None:
    """After a push vLLM drafts as one does that was started with the same folder."""
    prompts = trained.prompts[PROMPTS]
    fresh = sharing_engine(trained.target)
    fresh.load_draft(trained.folder)
    fresh_texts, better = notes.drafted(fresh, prompts)
    texts, with_noise = notes.drafted(serving, prompts)
    assert texts == fresh_texts
    assert with_noise != better
    with generating(serving, prompts) as rounds:
        for folder in (trained.folder, worse) * NUM_PUSHES:
            begun = time.monotonic()
            report = push(publisher, folder)
            assert report.committed, report
            status = publisher.serving()[trained.name]
            assert (status.state, status.version, status.digest) == (
                "committed",
                report.version,
                report.digest,
            )
            time.sleep(max(0.0, begun + 1.0 - time.monotonic()))
        while not rounds:  # on a busy machine all pushes may fall into one round; another one follows them
            time.sleep(0.1)
    assert len(rounds) > 1
    assert all(texts == fresh_texts for texts in rounds)
    assert notes.drafted(serving, prompts) == (fresh_texts, with_noise)
    report = push(publisher, trained.folder)
    assert report.committed
    assert notes.drafted(serving, prompts) == (fresh_texts, better)
    (answer,) = serving.generate(prompts[:1], DRAFTED)
    assert (answer.draft_version, answer.draft_digest) == (report.version, report.digest)
    assert len(notes.target_digests()) == 1


def test_a_revert_brings_back_what_was_served(trained, worse, serving, publisher, notes) -> None:
    prompts = trained.prompts[PROMPTS]
    assert push(publisher, trained.folder).committed
    before = notes.drafted(serving, prompts)
    assert push(publisher, worse).committed
    with_noise = notes.drafted(serving, prompts)
    assert with_noise[0] == before[0]
    assert with_noise[1] != before[1]
    publisher.revert().result(LIMIT_S)
    assert notes.drafted(serving, prompts) == before
    assert serving.acceptance().rounds > 0


def test_acceptance_counts_anew_from_a_commit(trained, worse, serving, publisher) -> None:
    assert push(publisher, trained.folder).committed
    serving.generate(trained.prompts[PROMPTS], DRAFTED)
    better = serving.acceptance()
    assert push(publisher, worse).committed
    assert serving.acceptance().rounds == 0
    serving.generate(trained.prompts[PROMPTS], DRAFTED)
    assert serving.acceptance().acceptance_length < better.acceptance_length


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        pytest.param(lambda tensors: tensors.pop("fc.weight"), "lacks fc.weight", id="missing"),
        pytest.param(lambda tensors: tensors.update(more=torch.zeros(1)), "has more besides", id="besides"),
        pytest.param(
            lambda tensors: tensors.update({"norm.weight": torch.zeros(3)}), "expected float32", id="shape"
        ),
    ],
)
def test_an_update_that_does_not_fit_leaves_the_old_draft(
    trained, serving, publisher, notes, damage, problem
) -> None:
    prompts = trained.prompts[PROMPTS][:1]
    before = notes.drafted(serving, prompts)
    tensors = weights_of(trained.folder)
    damage(tensors)
    report = publisher.publish(next(VERSIONS), tensors).result(LIMIT_S)
    assert not report.committed
    assert problem in report.replicas[trained.name].reason
    assert notes.drafted(serving, prompts) == before


def test_damage_on_the_way_leaves_the_old_draft(
    trained, worse, serving, publisher, transports, notes, monkeypatch
) -> None:
    prompts = trained.prompts[PROMPTS][:1]
    before = notes.drafted(serving, prompts)
    send = transports["file"].sender

    def damaged(manifest, weights, *others):
        found = weights["fc.weight"].clone()
        found.view(torch.uint8)[-1, -1] ^= 1
        return send(manifest, {**weights, "fc.weight": found}, *others)

    monkeypatch.setattr(transports["file"], "sender", damaged)
    report = push(publisher, worse)
    assert not report.committed
    assert "fc.weight has arrived with digest" in report.replicas[trained.name].reason
    assert notes.drafted(serving, prompts) == before
    monkeypatch.undo()
    assert push(publisher, worse).committed


@pytest.mark.parametrize(("at", "is_after"), [(1, False), (2, True), (33, False), (45, True)])
def test_a_fault_in_the_midst_of_the_swap_leaves_the_old_draft(
    trained, worse, serving, publisher, notes, at, is_after
) -> None:
    """Eagle3's last ones are in packed weights; ``tests/unit/engine_vllm`` has every statement."""
    prompts = trained.prompts[PROMPTS][:1]
    assert push(publisher, trained.folder).committed
    before = notes.drafted(serving, prompts)
    notes.plant(at, is_after)
    report = push(publisher, worse)
    assert not report.committed
    assert f"planted at {at}" in report.replicas[trained.name].reason
    assert notes.drafted(serving, prompts) == before
    assert len(notes.target_digests()) == 1


def test_a_draft_that_is_half_of_each_ends_the_engine_with_its_cause(
    trained, worse, serving, publisher, notes
) -> None:
    """The last test of this vLLM."""
    notes.plant(20, True, True)
    report = push(publisher, worse)
    assert not report.committed
    with pytest.raises(EngineError, match="TornDraftError: the draft was left half exchanged: planted at 20"):
        serving.generate(trained.prompts[:1], DRAFTED)


class Server(PageServer):
    """vLLM's server as a user starts it, by the page's command."""

    def __init__(self, target: Path, first: Path, mine: Path, folder: Path) -> None:
        here = {
            "dtype": "float32",
            "max-model-len": 200,
            "kv-cache-memory-bytes": 64 << 20,
            "enforce-eager": True,  # the page says so of CPUs
            "tokens-only": True,
            "no-enable-prefix-caching": True,
            "no-enable-chunked-prefill": True,
        }
        super().__init__(shell_block("spec_engine_vllm"), folder, target, first, mine, here)

    def generate(self, prompts: list[list[int]]) -> tuple[list[list[int]], dict[str, str]]:
        """Return the greedy text after each prompt, and the headers of the last answer."""
        texts, headers = [], {}
        for prompt in prompts:
            sampling = {"max_tokens": 60, "temperature": 0.0, "ignore_eos": True}
            fields = {"token_ids": prompt, "sampling_params": sampling}
            status, headers, body = self.ask("POST", "/inference/v1/generate", fields)
            assert status == 200, body
            texts.append(json.loads(body)["choices"][0]["token_ids"])
        return texts, headers


@pytest.fixture
def server(vllm_environment, llama, trained, worse, tmp_path, vllm_context) -> Iterator[Server]:
    server = Server(llama, worse, trained.folder, tmp_path)
    try:
        server.wait_ready(vllm_context.start_s)
        yield server
    finally:
        server.close()


@pytest.mark.slow
@pytest.mark.parametrize("trained", ["eagle3"], indirect=True)
def test_a_server_that_a_user_has_started_takes_fresh_weights(
    llama, server, trained, worse, transports, notes
) -> None:
    prompts = trained.prompts[PROMPTS]
    texts, headers = server.generate(prompts)
    assert "x-draft-version" not in headers
    status, _, body = server.ask("GET", "/spec/draft/status", token="another")
    assert (status, "bearer token" in body.decode()) == (401, True)
    with pytest.raises(EngineError, match="refused status: a bearer token is needed"):
        HttpReplica(server.url, "another")

    replica = HttpReplica(server.url, server.token)
    before = replica.acceptance()
    assert before.rounds > 0
    tensors = weights_of(trained.folder)
    with Publisher(transports, read_target(llama).digest) as publisher:
        publisher.add("server", replica).result(LIMIT_S)
        report = publisher.publish(1, tensors).result(LIMIT_S)
        refused = publisher.publish(2, {**tensors, "more": torch.zeros(1)}).result(LIMIT_S)
    assert report.committed, report
    assert "has more besides" in refused.replicas["server"].reason
    assert replica.acceptance().rounds == 0
    with ThreadPoolExecutor(1) as asking:
        held = asking.submit(replica.acceptance, rounds=5, wait_s=30.0)
        after, headers = server.generate(prompts)
        assert held.result(LIMIT_S).rounds >= 5
    assert after == texts
    assert headers["x-draft-version"] == "1"
    assert headers["x-draft-digest"] == report.digest
    assert replica.acceptance().acceptance_length > before.acceptance_length
    assert len(notes.target_digests()) == 1

    pushed, served = server.push_as_on_the_page()
    assert pushed.startswith(f"{server.url}  committed  version 2 by ")
    after, headers = server.generate(prompts)
    assert (after, headers["x-draft-version"]) == (texts, "2")
    assert served.startswith(f"{server.url}  version 2  {headers['x-draft-digest']}  committed")
