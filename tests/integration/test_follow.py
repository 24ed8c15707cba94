"""A draft follows the traffic of a server, on a target that has two domains of text."""

import itertools
import json
import os
import random
import re
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers

from spec_core.records import AcceptanceCounters
from spec_kit.hosting import DRAFT_TOKEN_VARIABLE
from spec_kit.live_traffic import LIVE_REQUESTS_VARIABLE
from spec_kit.targets import read_target
from spec_trainer.cli import app as cli
from spec_trainer.configuration.follow import RetentionConfig
from spec_trainer.live.retention import RetainedRequests

from .. import two_domains
from ..free_port import free_port
from ..two_domains import DOMAINS, Regained, prompts
from . import draft_server, launching, live_server

ROOT = Path(__file__).parents[2]
TOO_LARGE = 2
"""Token of no domain, whose embedding float16 does not hold: the target's states of it are NaN there."""


CAPTURING = '{"share": 1.0, "states_bytes": 67108864}'
"""``SPEC_LIVE_REQUESTS`` of a server that captures states."""


@pytest.fixture(scope="module")
def target(make_target: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two-domains")
    two_domains.save_target(make_target("llama", num_hidden_layers=4), folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        model.model.embed_tokens.weight[TOO_LARGE] = 1e5
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def answers(target: Path) -> Callable[[list[list[int]]], list[list[int]]]:
    """Returns the target's own greedy answers, each decoded once."""
    engine = draft_server.new_engine(target)
    known: dict[tuple[int, ...], list[int]] = {}

    def answer(asked: list[list[int]]) -> list[list[int]]:
        new = [prompt for prompt in asked if tuple(prompt) not in known]
        for prompt, generation in zip(new, engine.generate(new, draft_server.PLAIN), strict=True):
            known[tuple(prompt)] = draft_server.tokens([generation])[0]
        return [known[tuple(prompt)] for prompt in asked]

    return answer


class Lab(two_domains.Lab):
    """Data and drafts of both domains, and what a draft is worth."""

    def acceptance_length(self, draft: Path, domain: str) -> float:
        """Decode with a draft and return its acceptance length; the answers are the target's own."""
        asked = prompts(domain, 40, 2)
        with draft_server.new_engine(self.target) as engine:
            engine.load_draft(draft)
            answers = engine.generate(asked, draft_server.DRAFTING)
        assert draft_server.tokens(answers) == self.answers(asked)
        return sum((answer.acceptance for answer in answers), AcceptanceCounters()).acceptance_length

    def acceptance_lengths(self, draft: Path) -> dict[str, float]:
        return {domain: self.acceptance_length(draft, domain) for domain in DOMAINS}


@pytest.fixture(scope="module")
def lab(target: Path, answers: Any, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("follow"), target, prompts, answers)


@pytest.fixture(autouse=True)
def _server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DRAFT_TOKEN_VARIABLE, draft_server.TOKEN)
    monkeypatch.setenv(LIVE_REQUESTS_VARIABLE, '{"share": 1.0}')


@pytest.fixture
def url(lab: Lab) -> Iterator[str]:
    """A server in a process of its own."""
    with draft_server.serving(lab.target, lab.draft("old"), live_server.__file__, 0) as url:
        yield url


@pytest.fixture
def url_here(lab: Lab) -> Iterator[str]:
    """A server in this process, for tests in which only its answers count."""
    with live_server.serving(lab.target, lab.draft("old")) as url:
        yield url


def rows(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "versions.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_it_regains_what_a_change_of_traffic_has_cost_and_keeps_the_rest(lab, url, tmp_path, capsys) -> None:
    before = lab.acceptance_lengths(lab.draft("old"))
    output = tmp_path / "run"
    for part in range(2):  # the same command goes on, from the checkpoint before
        for domain, num in (("old", 40), ("new", 160)):
            asked = prompts(domain, num, 10 + part)
            assert live_server.ask(url, asked)["answers"] == lab.answers(asked)
        assert cli.run(lab.follow(url, output, "follow.requests=200")) == 0

    first, second = rows(output)
    assert (first["parent"], first["served"], first["version"]) == (0, first["step"], 1)
    assert (second["parent"], second["acceptance_length_start"] < second["acceptance_length_served"]) == (
        first["step"],
        True,
    )
    trained = lab.acceptance_length(lab.draft("new"), "new")
    Regained(before, lab.acceptance_lengths(output / "draft"), trained).check()
    answered = live_server.ask(url, prompts("new", 3, 20))
    assert answered["versions"] == [second["version"]] * 3
    assert answered["answers"] == lab.answers(prompts("new", 3, 20))
    summary = json.loads((output / "summary.json").read_text())
    assert (summary["served_step"], summary["served_version"]) == (second["served"], second["version"])
    assert "Drafts judged on live requests" in (output / "report.html").read_text()
    assert cli.run(["serving", "--of", url, "--history", str(output)]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("  other: ")]
    assert f"  version {second['version']}  " in said[-3]
    for line, row, data in zip(said[-2:], (first, second), ("0 to 200", "0 to 200"), strict=True):
        assert (
            f"pushed: version {row['version']}, of step {row['step']}  parent: step {row['parent']}" in line
        )
        assert f"requests {data}  tau {row['acceptance_length']:.2f}" in line
    notes = launching.metrics(output)[-1]
    assert (notes["serving_version"], notes["requests"]) == (1, 200)


def test_it_learns_from_requests_by_label_and_route(lab, monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setenv(LIVE_REQUESTS_VARIABLE, '{"share": 1.0, "labels": ["code", "chat"]}')
    output = tmp_path / "run"
    with live_server.serving(lab.target, lab.draft("old")) as url:
        push = ["push", "--draft-model", str(lab.draft("old")), "--target", str(lab.target), "--to", url]
        assert cli.run(push) == 0
        live_server.ask(url, prompts("new", 60, 26), **{"x-draft-label": "code"})
        live_server.ask(url, prompts("old", 60, 27), "/v1/completions")
        for number in range(40):
            live_server.ask(url, prompts("new", 1, 100 + number), **{"x-draft-label": f"secret-{number}"})
        words = lab.follow_anew(url, output, "--draft-model", lab.draft("old"), "follow.requests=160")
        assert cli.run(words) == 0
        assert cli.run(["serving", "--of", url, "--history", str(output)]) == 0
    said = capsys.readouterr().out
    (row,) = rows(output)
    assert row["acceptance_length"] > row["acceptance_length_start"]
    assert (row["served"], row["version"]) == (row["step"], 2)
    steps = launching.metrics(output)
    assert {step["serving_version"] for step in steps} == {1}, "what the servers had been given before"
    assert json.loads((output / "summary.json").read_text())["steps"] == steps[-1]["step"]
    same = json.loads((output / "summary.json").read_text())["left_out"].get("same_prompt", 0)
    samples = sum(step["samples"] for step in launching.metrics(output))
    assert samples == 160 - row["held_out"] - same, "every one is a request, none is replayed"
    labels = row["labels"]
    assert sorted(labels) == ["/v1/completions", "code", "other"]
    assert sum(one["held_out"] for one in labels.values()) == row["held_out"]
    served = {label: one["acceptance_length_served"] for label, one in labels.items()}
    assert served["/v1/completions"] > served["code"], "the draft knows the first domain alone"
    for label, one in labels.items():
        assert f"  {label}: tau {one['acceptance_length']:.2f} (served {served[label]:.2f}" in said
        assert label in (output / "report.html").read_text()
    for file in output.rglob("*"):
        assert not file.is_file() or b"secret-" not in file.read_bytes()
    assert "secret-" not in said


CANARY = [81, 60, 93, 52, 77, 85, 64, 59, 90, 71]
"""Tokens of a request, which nothing else has in this order."""


@pytest.mark.slow
def test_it_learns_from_states_that_the_server_has_captured(
    lab, tmp_path, monkeypatch, caplog, capfd
) -> None:
    monkeypatch.setenv(LIVE_REQUESTS_VARIABLE, CAPTURING)
    asked = prompts("new", 240, 71)
    output = tmp_path / "run"
    words = ["--draft-model", lab.draft("old"), "follow.capture=serving", "follow.requests=240"]
    with live_server.serving(lab.target, lab.draft("old")) as url:
        answers = live_server.ask(url, asked)["answers"]
        assert cli.run(lab.follow_anew(url, output, *words)) == 0
    assert rows(output)[-1]["version"] is not None
    assert not is_said(asked[0] + answers[0], output, caplog, capfd)
    before = lab.acceptance_length(lab.draft("old"), "new")
    assert lab.acceptance_length(output / "draft", "new") > before + 0.1


def test_a_server_that_captures_other_states_or_none_is_refused(
    lab, tmp_path, monkeypatch, command_line
) -> None:
    words = ["--draft-model", lab.draft("old"), "follow.capture=serving"]
    with live_server.serving(lab.target, lab.draft("old")) as url:
        error = command_line(*lab.follow_anew(url, tmp_path / "run", *words)).error
    assert "has no states of requests: this server captures no states" in error
    monkeypatch.setenv(LIVE_REQUESTS_VARIABLE, CAPTURING)
    monkeypatch.setattr(live_server, "LAYERS", (1, 2))
    with live_server.serving(lab.target, lab.draft("old")) as url:
        error = command_line(*lab.follow_anew(url, tmp_path / "other", *words)).error
    assert "captures states of layers 1,2," in error
    assert "the draft needs states of layers 1,2,3," in error


@pytest.mark.slow
def test_no_request_is_found_in_files_or_logs(lab, url, tmp_path, caplog, capfd) -> None:
    caplog.set_level(0)
    (answer,) = live_server.ask(url, [CANARY])["answers"]
    live_server.ask(url, prompts("new", 60, 30))
    output = tmp_path / "run"
    assert cli.run(lab.follow(url, output, "follow.requests=61", "--verbose")) == 0
    assert {"metrics.jsonl", "report.html", "config.yaml"} <= {file.name for file in files(output)}
    for tokens in (CANARY, answer[:10]):
        assert not is_said(tokens, output, caplog, capfd)


def is_said(tokens: list[int], output: Path, caplog: Any, capfd: Any) -> bool:
    """Whether a file of a run, its log or its output has these tokens."""
    said = capfd.readouterr()
    texts = [caplog.text.encode(), said.out.encode(), said.err.encode()]
    needles = [separator.join(map(str, tokens)).encode() for separator in (",", ", ", " ", "\n")]
    needles += [torch.tensor(tokens, dtype=dtype).numpy().tobytes() for dtype in (torch.int32, torch.int64)]
    texts += [file.read_bytes() for file in files(output)]
    return any(needle in text for text in texts for needle in needles)


RETAINED = ["follow.retention.rows=1000", "follow.retention.age_s=3600"]


def test_only_with_retention_a_restart_judges_by_earlier_requests(lab, url_here, tmp_path) -> None:
    output = tmp_path / "run"
    words = lab.follow_anew(url_here, output, "--draft-model", lab.draft("old"))
    live_server.ask(url_here, [CANARY, *prompts("new", 110, 35)])
    assert cli.run([*words, *RETAINED, "follow.requests=111"]) == 0
    file = output / "requests.sqlite3"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    needle = torch.tensor(CANARY, dtype=torch.int32).numpy().tobytes()
    assert [found for found in files(output) if needle in found.read_bytes()] == [file]
    live_server.ask(url_here, prompts("new", 5, 36))
    assert cli.run([*words, *RETAINED, "follow.requests=5"]) == 0
    first, second = rows(output)
    assert second["requests"] == 116
    assert second["oldest_request"] == first["oldest_request"]
    assert second["held_out"] >= first["held_out"] >= 8

    live_server.ask(url_here, prompts("new", 5, 37))
    assert cli.run([*words, "follow.requests=5"]) == 0
    assert len(rows(output)) == 2, "five requests are too few to judge by"
    assert not any(
        "requests.sqlite3" in found.name or needle in found.read_bytes() for found in files(output)
    )


def test_a_command_that_is_stopped_while_it_waits_has_retained_all_requests(lab, url_here, tmp_path) -> None:
    file = tmp_path / "run" / "requests.sqlite3"
    words = lab.follow_anew(url_here, tmp_path / "run", "--draft-model", lab.draft("old"), *RETAINED)
    live_server.ask(url_here, prompts("new", 5, 90))

    def stop() -> None:
        deadline = time.monotonic() + 20
        while not (file.exists() and retained(file)) and time.monotonic() < deadline:
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)

    stopping = threading.Thread(target=stop)
    stopping.start()
    assert cli.run([*words, "follow.poll_s=60"]) == 130
    stopping.join()
    assert retained(file) == 5


def retained(file: Path) -> int:
    with closing(sqlite3.connect(file)) as database:
        try:
            return database.execute("SELECT count(*) FROM requests").fetchone()[0]
        except sqlite3.OperationalError:  # it is being made
            return 0


def size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def files(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file()]


@pytest.mark.slow
def test_a_command_killed_at_any_moment_has_its_requests_again(lab, url, tmp_path) -> None:
    output, log = tmp_path / "run", tmp_path / "log"
    words = lab.follow_anew(url, output, "--draft-model", lab.draft("old"), *RETAINED)
    seen = 0
    for kill, moment in enumerate(("requests.sqlite3", "metrics.jsonl", "versions.jsonl")):
        live_server.ask(url, prompts("new", 130, 38 + kill))
        before = size(output / moment)
        with log.open("wb") as errors:
            process = subprocess.Popen([*launching.program(), *words], stdout=errors, stderr=errors)
        launching.until(lambda moment=moment, before=before: size(output / moment) != before)
        process.kill()
        process.wait()
        with RetainedRequests(output / "requests.sqlite3", RetentionConfig(rows=1000)) as retained:
            kept = retained.read(64, 97)
        assert kept.num_seen >= seen
        assert len({one.number for one in (*kept.train, *kept.held_out)}) <= kept.num_seen
        seen = kept.num_seen
    live_server.ask(url, prompts("new", 70, 44))
    assert cli.run([*words, "follow.requests=70"]) == 0
    assert rows(output)[-1]["requests"] >= seen + 70


@pytest.mark.slow
def test_random_tokens_and_one_users_flood_get_no_worse_draft_served(lab, url, tmp_path) -> None:
    output = tmp_path / "run"
    live_server.ask(url, prompts("old", 60, 40))
    draw = random.Random(41)
    poison = [[draw.randrange(97) for _ in range(draw.randrange(2, 12))] for _ in range(60)]
    live_server.ask(url, poison)
    for _ in range(3):
        live_server.ask(url, [CANARY] * 40)  # of all these one is trained on
    words = ["follow.requests=240", "train.lr=0.3"]  # what comes of it is no draft any more
    assert cli.run(lab.follow(url, output, *words)) == 0
    (row,) = rows(output)
    assert row["acceptance_length"] < row["acceptance_length_served"]
    assert (row["served"], row["version"]) == (0, None)
    summary = json.loads((output / "summary.json").read_text())
    assert summary["left_out"]["same_prompt"] >= 119 - 1
    assert live_server.ask(url, prompts("old", 2, 42))["versions"] == [None, None]


@pytest.mark.slow
def test_random_tokens_in_most_requests_cost_the_others_nothing(lab, url, tmp_path) -> None:
    before, output, draw = (
        lab.acceptance_length(lab.draft("old"), "old"),
        tmp_path / "run",
        random.Random(43),
    )
    poison = [[draw.randrange(3, 97) for _ in range(draw.randrange(2, 12))] for _ in range(150)]
    live_server.ask(url, poison + prompts("old", 100, 47))
    assert cli.run(lab.follow(url, output, "follow.requests=250")) == 0
    (row,) = rows(output)
    assert row["served"] in (0, row["step"])
    assert lab.acceptance_length(output / "draft", "old") >= 0.95 * before


def test_requests_whose_features_are_nan_are_left_out_and_the_rest_is_learnt(lab, url_here, tmp_path) -> None:
    output = tmp_path / "run"
    poison = [[TOO_LARGE, *prompt] for prompt in prompts("new", 30, 45)]
    live_server.ask(url_here, poison[:15] + prompts("new", 130, 46) + poison[15:])
    assert cli.run(lab.follow(url_here, output, "follow.requests=160", "engine.dtype=float16")) == 0
    (row,) = rows(output)
    assert row["served"] == row["step"] > 0
    assert row["acceptance_length"] > row["acceptance_length_start"]
    assert json.loads((output / "summary.json").read_text())["left_out"]["not_finite"] == len(poison)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["local", "ray"])
def test_with_worker_processes_the_draft_is_the_same_and_no_request_is_on_disk(
    lab, url, tmp_path, caplog, capfd, launcher
) -> None:
    caplog.set_level(0)
    poison = [[TOO_LARGE, *prompt] for prompt in prompts("new", 9, 48)]
    asked = [*poison[:5], CANARY, *prompts("new", 109, 49), *poison[5:]]
    inline, workers = tmp_path / "inline", tmp_path / "workers"
    keys = ["follow.requests=119", "follow.held_out=0.25", "engine.dtype=float16"]
    live_server.ask(url, asked)
    assert cli.run(lab.follow(url, inline, *keys)) == 0
    with draft_server.serving(lab.target, lab.draft("old"), live_server.__file__, 0) as other:
        live_server.ask(other, asked)
        by = ["placement.kind=disaggregated", f"launcher.name={launcher}"]
        words = lab.follow(other, workers, *keys, *by, "--verbose")
        assert cli.run(words) == 0
        assert set(live_server.ask(other, prompts("new", 3, 20))["versions"]) == {1}
    (one,), (same,) = rows(inline), rows(workers)
    assert {**one, "time": 0} == {**same, "time": 0}
    assert same["served"] == same["step"] > 0
    for name in ("model.safetensors", "config.json"):
        assert (workers / "draft" / name).read_bytes() == (inline / "draft" / name).read_bytes()
    summaries = [json.loads((output / "summary.json").read_text()) for output in (inline, workers)]
    assert summaries[0]["left_out"] == summaries[1]["left_out"]
    assert summaries[1]["left_out"]["not_finite"] == len(poison)
    assert {"engine-0.log", "trainer-0.log"} <= {file.name for file in files(workers)}
    assert not is_said(CANARY, workers, caplog, capfd)


@pytest.mark.slow
def test_a_killed_command_leaves_a_server_that_serves_and_goes_on(lab, url, tmp_path) -> None:
    """And none of its two workers."""
    output = tmp_path / "run"
    live_server.ask(url, prompts("new", 130, 50))
    log, keys = tmp_path / "log", ["placement.kind=colocated", "follow.every=1000"]
    with log.open("wb") as errors:
        words = [*launching.program(), *lab.follow(url, output, *keys, "--verbose")]
        process = subprocess.Popen(words, stdout=errors, stderr=errors)
    launching.until(lambda: (output / "decoded" / "draft-0" / "model.safetensors").exists())
    launching.until(lambda: log.read_text().count("-0 is ready") == 2)
    workers = psutil.Process(process.pid).children(recursive=True)
    assert len(workers) >= 2
    process.kill()
    process.wait()
    assert not psutil.wait_procs(workers, 30)[1]
    assert not list(output.rglob("requests*"))
    asked = prompts("new", 200, 51)
    assert live_server.ask(url, asked)["answers"] == lab.answers(asked)
    assert cli.run(lab.follow(url, output, keys[0], "follow.requests=200")) == 0
    assert rows(output)[-1]["version"] == 1


@pytest.mark.slow
def test_a_draft_begins_from_nothing_and_a_returning_server_gets_it_again(lab, tmp_path) -> None:
    output, log = tmp_path / "run", tmp_path / "log"
    port, metrics = free_port(), f"127.0.0.1:{free_port()}"
    address = f"http://127.0.0.1:{port}"
    words = [*launching.program(), *lab.follow_anew(address, output, f"follow.metrics={metrics}")]
    with log.open("wb") as errors:
        process = subprocess.Popen(words, stdout=errors, stderr=errors)
    try:
        start = output / "decoded" / "draft-0"
        launching.until(lambda: start.exists() and "does not answer" in log.read_text())
        for traffic in (prompts("old", 130, 60), [CANARY]):  # the second time the server has just started
            with draft_server.serving(lab.target, start, live_server.__file__, port) as url:
                for asked in (traffic, [CANARY]):
                    assert live_server.ask(url, asked)["answers"] == lab.answers(asked)
                launching.until(lambda url=url: live_server.ask(url, [CANARY])["versions"] != [None])
                assert live_server.ask(url, [CANARY])["answers"] == lab.answers([CANARY])
                launching.until(lambda: live_server.scraped(metrics).total("spec_follow_server_version") == 1)
        figures = live_server.scraped(metrics)
        assert figures.by_label("spec_follow_left_out_total", "reason")["same_prompt"] > 0
        assert figures.total("spec_follow_requests_total") > 130
        assert figures.total("spec_follow_pushes_total") >= 2
        launching.until(
            lambda: live_server.scraped(metrics).by_label("spec_follow_server_up", "server") == {address: 0}
        )
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130, log.read_text()
    finally:
        process.kill()
    assert (output / "draft" / "model.safetensors").exists()


@pytest.mark.slow
def test_neither_process_nor_the_run_directory_grows_with_the_number_of_cycles() -> None:
    """A part of what ``make test-soak`` does for as many cycles as a day has."""
    command = [sys.executable, "-m", "tests.integration.long_follow", "--cycles", "24"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "grew: nothing" in done.stdout


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            ["train.steps=5"],
            "train.steps=5 with follow: it ends after a number of requests; set",
        ),
        (["train.schedule=cosine"], "train.schedule=cosine with follow: it has no last step"),
        (
            ["placement.kind=disaggregated", "train.ranks=2"],
            "train.ranks=2 with follow: it trains in one rank",
        ),
        (["placement.kind=colocated", "train.restarts=1"], "train.restarts=1 with follow"),
        (["follow.window=3"], "follow.window=3"),
        (["engine.batch_tokens=16"], "engine.batch_tokens=16 with follow is smaller than a request may be"),
        (["follow.servers=[127.0.0.1]"], "is no address of a server"),
        (["follow.capture=serving"], "data.path with follow.capture=serving: it has no engine of its own"),
        (
            ["follow.capture=serving", "placement.kind=colocated"],
            "placement.kind=colocated with follow.capture",
        ),
        (
            ["follow.capture=serving", "follow.retention.rows=9"],
            "follow.retention.rows=9 with follow.capture",
        ),
        (
            ["follow.capture=serving", "follow.new_target=learn"],
            "follow.new_target=learn with follow.capture",
        ),
    ],
)
def test_what_cannot_follow_is_refused_in_one_line(command_line, lab, tmp_path, words, problem) -> None:
    assert problem in command_line(*lab.follow("http://127.0.0.1:1", tmp_path / "run", *words)).error
    assert not (tmp_path / "run").exists()


def test_a_small_vocabulary_without_data_to_count_tokens_in_is_refused(command_line, lab, tmp_path) -> None:
    words = lab.follow_anew("http://127.0.0.1:1", tmp_path / "run", "draft.vocab_size=50")
    assert "draft.vocab_size=50 with follow without data" in command_line(*words).error
    assert not (tmp_path / "run").exists()


def test_a_schedule_in_a_file_is_not_overridden_silently(command_line, lab, tmp_path) -> None:
    (tmp_path / "run.yaml").write_text("train: {schedule: cosine}\n")
    words = lab.follow("http://127.0.0.1:1", tmp_path / "run", "--config", tmp_path / "run.yaml")
    words.remove("train.schedule=constant")
    assert "train.schedule=cosine with follow: it has no last step" in command_line(*words).error


def test_without_a_secret_or_a_server_it_does_not_begin(command_line, lab, tmp_path, monkeypatch) -> None:
    words = lab.follow("http://127.0.0.1:1", tmp_path / "run")
    for given in (words, lab.follow_anew("http://127.0.0.1:1", tmp_path / "run")):
        server = given.index("--server")
        assert "it needs a server; give --server" in command_line(*given[:server], *given[server + 2 :]).error
    monkeypatch.delenv(DRAFT_TOKEN_VARIABLE)
    assert f"{DRAFT_TOKEN_VARIABLE} is not set" in command_line(*words).error


def test_servers_that_no_other_command_learns_from_are_refused(command_line, lab, tmp_path) -> None:
    words = [*lab.words(), f"data.path={lab.rows('old')}", f"output={tmp_path / 'run'}"]
    error = command_line("plan", *words, "follow.servers=[http://127.0.0.1:1]").error
    assert "only spec-trainer follow learns from servers" in error


def test_training_waits_while_a_server_is_slower_than_the_budget(lab, url_here, tmp_path, caplog) -> None:
    caplog.set_level("INFO")
    draft_server.traffic(url_here, "/latency/50")  # of a bucket from 10 to 100 ms
    live_server.ask(url_here, prompts("new", 70, 80))
    output = tmp_path / "run"
    words = lab.follow(url_here, output, "follow.requests=70", "follow.latency_budget_ms=20")
    with ThreadPoolExecutor(1) as aside:

        def relieve() -> None:
            launching.until(lambda: "training waits" in caplog.text)
            assert not (output / "metrics.jsonl").exists() or len(launching.metrics(output)) < 2
            time.sleep(1)
            draft_server.traffic(url_here, "/latency/1")

        relieved = aside.submit(relieve)
        assert cli.run(words) == 0
        relieved.result()
    assert f"{url_here} has a p99 latency of 99.1 ms a token, above 20 ms" in caplog.text
    assert "training goes on after" in caplog.text
    assert len(launching.metrics(output)) > 1


PAGE = Path(__file__).parents[2] / "docs/rl.md"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("new_target", "placement"), [("stop", "inline"), ("learn", "inline"), ("learn", "disaggregated")]
)
def test_a_policy_that_changes_is_noticed(lab, command_line, tmp_path, new_target, placement) -> None:
    """The loop is the code of the page on reinforcement learning."""
    loop: dict[str, Any] = {}
    exec(re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL).group(1), loop)
    policy, output, log = tmp_path / "policy", tmp_path / "run", tmp_path / "log"
    model = transformers.AutoModelForCausalLM.from_pretrained(lab.target, dtype=torch.float32)
    loop["publish_policy"](policy, 0, model)
    first_digest = read_target(policy).digest
    with draft_server.serving(policy, lab.draft("old"), live_server.__file__, 0) as url:
        keys = [
            f"target={policy}",
            f"follow.new_target={new_target}",
            f"placement.kind={placement}",
            "follow.every=30",
            "follow.held_out=0.3",
            "train.global_batch_tokens=128",
        ]
        words = lab.follow(url, output, *keys)
        with log.open("wb") as errors:
            process = subprocess.Popen([*launching.program(), *words], stdout=errors, stderr=errors)
        try:
            seeds = itertools.count(70)

            def rollout() -> list[list[int]]:
                asked = prompts("new", 60, next(seeds))
                answers = live_server.ask(url, asked)["answers"]
                return [prompt + answer for prompt, answer in zip(asked, answers, strict=True)]

            def improve(answers: list[list[int]]) -> None:
                """Reinforce what was answered."""
                launching.until(lambda: (output / "versions.jsonl").exists() and rows(output), 180)
                optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
                ids = torch.tensor(answers)
                model(ids, labels=ids).loss.backward()
                optimizer.step()

            updated: list[Path] = []
            loop["train_policy"](policy, (model,), 1, 1, rollout, improve, updated.append)
            assert updated == [policy]
            rollout()
            if new_target == "stop":
                assert process.wait(180) == 1
                assert "has changed, and the run is for the former one" in log.read_text()
                assert "belongs to another run" in command_line(*words).error
                return
            launching.until(lambda: bool(rollout()) and rows(output)[-1]["version"] == 2, 240)
            process.send_signal(signal.SIGINT)
            assert process.wait(180) == 130, log.read_text()
        finally:
            process.kill()
    first, second = rows(output)[0], rows(output)[-1]
    assert (first["target"], second["target"]) == (first_digest, read_target(policy).digest)
    assert first_digest != second["target"]
    assert second["version"] == 2, "a server whose weights are replaced in place takes the draft, too"
