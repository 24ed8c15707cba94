"""Servers that a draft follows: killed commands, servers that return, that are slow, or whose target changes."""

import itertools
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers

from spec_kit.targets import read_target
from spec_trainer.cli import app as cli

from ...free_port import free_port
from ...two_domains import prompts
from .. import draft_server, launching, live_server, run_directory
from .traces import CANARY

ROOT = Path(__file__).parents[3]


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
    assert run_directory.versions(output)[-1]["version"] == 1


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


def test_training_waits_while_a_server_is_slower_than_the_budget(lab, url_here, tmp_path, caplog) -> None:
    caplog.set_level("INFO")
    draft_server.traffic(url_here, "/latency/50")  # of a bucket from 10 to 100 ms
    live_server.ask(url_here, prompts("new", 70, 80))
    output = tmp_path / "run"
    words = lab.follow(url_here, output, "follow.requests=70", "follow.latency_budget_ms=20")
    with ThreadPoolExecutor(1) as aside:

        def relieve() -> None:
            launching.until(lambda: "training waits" in caplog.text)
            assert not (output / "metrics.jsonl").exists() or len(run_directory.metrics(output)) < 2
            time.sleep(1)
            draft_server.traffic(url_here, "/latency/1")

        relieved = aside.submit(relieve)
        assert cli.run(words) == 0
        relieved.result()
    assert f"{url_here} has a p99 latency of 99.1 ms a token, above 20 ms" in caplog.text
    assert "training goes on after" in caplog.text
    assert len(run_directory.metrics(output)) > 1


PAGE = Path(__file__).parents[3] / "docs/rl.md"


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
            f"target={policy}", f"follow.new_target={new_target}", f"placement.kind={placement}",
            "follow.every=30", "follow.held_out=0.3", "train.global_batch_tokens=128",
        ]  # fmt: skip
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
                launching.until(lambda: run_directory.versions(output), 180)
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
            launching.until(
                lambda: bool(rollout()) and run_directory.versions(output)[-1]["version"] == 2, 240
            )
            process.send_signal(signal.SIGINT)
            assert process.wait(180) == 130, log.read_text()
        finally:
            process.kill()
    first, second = run_directory.versions(output)[0], run_directory.versions(output)[-1]
    assert (first["target"], second["target"]) == (first_digest, read_target(policy).digest)
    assert first_digest != second["target"]
    assert second["version"] == 2, "a server whose weights are replaced in place takes the draft, too"
