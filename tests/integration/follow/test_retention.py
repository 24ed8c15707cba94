"""Requests are in no file and no log, except where the command is told to retain them."""

import os
import signal
import sqlite3
import stat
import subprocess
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch

from spec_trainer.cli import app as cli
from spec_trainer.configuration.follow import RetentionConfig
from spec_trainer.live.retention import RetainedRequests

from ...two_domains import prompts
from .. import launching, live_server, run_directory
from .traces import CANARY, files, is_said


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
    first, second = run_directory.versions(output)
    assert second["requests"] == 116
    assert second["oldest_request"] == first["oldest_request"]
    assert second["held_out"] >= first["held_out"] >= 8

    live_server.ask(url_here, prompts("new", 5, 37))
    assert cli.run([*words, "follow.requests=5"]) == 0
    assert len(run_directory.versions(output)) == 2, "five requests are too few to judge by"
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
    assert run_directory.versions(output)[-1]["requests"] >= seen + 70
