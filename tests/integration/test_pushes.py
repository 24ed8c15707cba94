"""Pushes to running servers: by command, and from a run that trains; every server a process with live traffic."""

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from spec_kit.hosting import DRAFT_TOKEN_VARIABLE
from spec_kit.targets import read_target
from spec_testing import draw_draft

from . import draft_server, launching, run_directory

ROOT = Path(__file__).parents[2]
LIMIT_S = 120


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DRAFT_TOKEN_VARIABLE, draft_server.TOKEN)


@pytest.fixture(scope="module")
def drafts(lab: launching.Lab) -> dict[str, Path]:
    """One that has hardly been trained, and one that knows what the target answers to the servers' prompts."""
    rows = lab.folder / "answers.jsonl"
    answers = draft_server.answers(lab.keys["target"])
    rows.write_text(
        "".join(json.dumps({"input_ids": ids, "loss_mask": [1] * len(ids)}) + "\n" for ids in answers * 10)
    )
    for name, keys in {"fresh": {"train__lr": 1e-9, "train__steps": 1}, "trained": {}}.items():
        lab.train_here(lab.folder / name, data__path=rows, data__eval_samples=0, **keys)
    return {name: lab.folder / name / "draft" for name in ("fresh", "trained")}


@pytest.fixture(scope="module")
def draft(lab: launching.Lab) -> Path:
    """A draft of random weights, for pushes that are refused."""
    return draw_draft(lab.folder / "refused", read_target(lab.keys["target"]), seed=0)


@pytest.fixture
def fresh_server(lab: launching.Lab, drafts: dict[str, Path]) -> Iterator[str]:
    with draft_server.serving(lab.keys["target"], drafts["fresh"]) as url:
        yield url


def served(command_line, url: str) -> dict:
    outcome = command_line("serving", "--of", url, "--json")
    assert outcome.code == 0, outcome.err
    return json.loads(outcome.out)[url]


@pytest.mark.slow
def test_a_draft_is_pushed_by_command(command_line, lab, drafts, fresh_server, tmp_path):
    with draft_server.serving(lab.keys["target"], drafts["fresh"]) as other:
        both = ["--to", fresh_server, "--to", other]
        push = ["push", "--target", lab.keys["target"], *both, "--draft-model"]
        before = served(command_line, fresh_server)
        assert (before["version"], before["digest"]) == (None, "")

        outcome = command_line(
            *push, drafts["trained"], "--bucket-bytes", 4096
        )  # the servers' own are larger
        assert outcome.code == 0, outcome.err
        assert [line.split()[:4] for line in outcome.out.splitlines()] == [
            [url, "committed", "version", "1"] for url in (fresh_server, other)
        ]
        way = " by ipc (not collective: sockets, slower than host memory; not file: files, slower than host memory)  "
        assert outcome.out.count(way) == 2, outcome.out
        by_file = ["--transport", "file", "--folder", tmp_path]
        document = json.loads(command_line(*push, drafts["trained"], *by_file, "--json").out)
        assert (document["version"], document["committed"]) == (2, True)
        assert [path.name[:3] for path in tmp_path.iterdir()] == ["v2-"]
        # The folder would keep two versions by default; keep=1 is the transport's own option.
        push.insert(1, "push.options.file.keep=1")
        document = json.loads(command_line(*push, drafts["trained"], *by_file, "--json").out)
        assert [path.name[:3] for path in tmp_path.iterdir()] == ["v3-"]

        for url in (fresh_server, other):
            launching.until(lambda url=url: (served(command_line, url)["rounds"] or 0) > 20)
            now = served(command_line, url)
            assert (now["version"], now["digest"], now["state"]) == (3, document["digest"], "committed")
            assert draft_server.traffic(url)["as_without"]
        outcome = command_line("serving", "--of", fresh_server, other)
        assert (outcome.code, outcome.err) == (0, "")
        assert [line.split()[:3] for line in outcome.out.splitlines()] == [
            [url, "version", "3"] for url in (fresh_server, other)
        ]

        # One server alone gets another draft, by whatever way: the servers differ until both are pushed to.
        alone = ["push", "--target", lab.keys["target"], "--to", fresh_server, "--draft-model"]
        assert command_line(*alone, drafts["fresh"]).code == 0
        newer = served(command_line, fresh_server)["digest"]
        for words in ((), ("--json",)):
            outcome = command_line("serving", "--of", fresh_server, other, *words)
            assert (outcome.code, outcome.err) == (
                1,
                f"spec-trainer: error: the servers differ: version 4 {newer} at {fresh_server}; version 3 "
                f"{document['digest']} at {other}; the next spec-trainer push to all of them settles that\n",
            )
        assert command_line(*push, drafts["trained"]).code == 0
        assert command_line("serving", "--of", fresh_server, other).code == 0
        assert served(command_line, other)["version"] == 5


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--to", "127.0.0.1:1"], "'127.0.0.1:1' is no address of a server; expected http://host:port"),
        (["--to", "http://127.0.0.1:1", "--timeout-s", "0"], "--timeout-s=0.0: expected seconds above 0"),
        (["--to", "http://127.0.0.1:1", "--address", "0.0.0.0:0"], "that is every interface"),
        (
            ["push.options.file.kep=5", "--to", "http://127.0.0.1:1"],
            "unknown key 'push.options.file.kep' (did",
        ),
        (["push.option.file.keep=5", "--to", "http://127.0.0.1:1"], "(did you mean 'options'?)"),
        (["--to", "http://127.0.0.1:1", "push.options.file.keep=5"], "write it before the flags"),
        (["train.lr=5", "--to", "http://127.0.0.1:1"], "unknown section or key 'train'"),
        (["--to", "http://127.0.0.1:1", "--bucket-bytes", "5"], "--bucket-bytes=5: expected 4096 or more"),
    ],
)
def test_a_push_that_cannot_begin_is_refused_in_one_line(command_line, lab, draft, words, line):
    """``test_bad_addresses.py`` has other addresses and transports that are no use."""
    push = ["push", "--target", lab.keys["target"], "--draft-model", draft]
    assert line in command_line(*push, *words).error


def test_what_is_no_draft_of_the_target_is_refused_before_a_server_is_asked(command_line, lab, tiny_llama):
    push = ["push", "--to", "http://127.0.0.1:1", "--target"]
    assert command_line(*push, lab.keys["target"], "--draft-model", lab.folder).error
    assert command_line(*push, tiny_llama, "--draft-model", lab.folder / "nothing").error


def test_a_server_that_does_not_answer_is_named(command_line, lab, draft, monkeypatch):
    push = ["push", "--target", lab.keys["target"], "--draft-model", draft]
    outcome = command_line(*push, "--to", "http://127.0.0.1:1")
    assert outcome.code == 1
    assert outcome.err.startswith("spec-trainer: error: http://127.0.0.1:1 does not answer status: ")
    outcome = command_line("serving", "--of", "http://127.0.0.1:1")
    assert (outcome.code, outcome.out[:18]) == (1, "http://127.0.0.1:1")
    monkeypatch.setenv(DRAFT_TOKEN_VARIABLE, "hidden\r")
    refusal = command_line(*push, "--to", "http://127.0.0.1:1").error
    assert "the secret of the servers cannot be sent" in refusal
    assert "hidden" not in refusal
    monkeypatch.delenv(DRAFT_TOKEN_VARIABLE)
    assert (
        f"environment variable {DRAFT_TOKEN_VARIABLE} is not set"
        in command_line(*push, "--to", "http://127.0.0.1:1").error
    )


def test_the_secret_is_sent_nowhere_before_every_address_was_read(command_line, lab, draft):
    push = ["push", "--target", lab.keys["target"], "--draft-model", draft]
    with socket.create_server(("127.0.0.1", 0)) as server:
        first = f"http://127.0.0.1:{server.getsockname()[1]}"
        for wrong in ("127.0.0.1:8001", "http://a:99999", "http://a b:8001", "http://a:1/ü", "http://a:1\n"):
            for words in ([*push, "--to", first, "--to", wrong], ["serving", "--of", first, wrong]):
                assert "is no address of a server; expected http://host:port" in command_line(*words).error
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()


@pytest.mark.slow
def test_two_that_push_at_the_same_moment_get_two_versions_or_a_refusal(lab, drafts, fresh_server):
    """``tests/unit/kit/weight_sync/test_publisher.py`` goes through the moments at which one comes in between."""
    push = [*launching.program(), "push", "--target", lab.keys["target"], "--json", "--to", fresh_server]
    push += ["--timeout-s", str(LIMIT_S)]
    processes = [
        subprocess.Popen([*push, "--draft-model", drafts[name]], stdout=subprocess.PIPE, text=True)
        for name in ("fresh", "trained")
    ]
    outcomes = [json.loads(process.communicate(timeout=2 * LIMIT_S)[0]) for process in processes]
    committed = [outcome for outcome in outcomes if outcome["committed"]]
    assert committed
    assert len({outcome["version"] for outcome in committed}) == len(committed)
    for outcome in outcomes:
        reason = outcome["servers"][fresh_server]["reason"]
        assert outcome["committed"] or "publishes here; the one with fence" in reason


@pytest.mark.slow
def test_servers_of_a_killed_pusher_answer_and_take_the_next_push(lab, drafts):
    """It is killed before, between and after the commits: ``tests.integration.killed_pushes`` takes all moments.

    Its lines are those of the table in ``docs/weight-sync.md``.
    """
    commits = ["--every", "--function", "Delivery.commit", "--statements", "3"]
    options = [*commits, "--target", lab.keys["target"], "--drafts", *drafts.values()]
    command = [sys.executable, "-m", "tests.integration.killed_pushes", *options]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    page = [line.rpartition(" | ")[0] for line in (ROOT / "docs" / "weight-sync.md").read_text().splitlines()]
    lines = [line.rpartition(" | ")[0] for line in outcome.stdout.splitlines() if line.startswith("| ")]
    assert [line for line in lines if line not in page] == []
    assert [", ".join(line.split(" | ")[1:3]) for line in lines[1:]] == [
        *("old, old, 0", "new, old, 1", "new, new, 0")
    ], outcome.stdout


@pytest.mark.slow
def test_a_run_pushes_while_it_trains(command_line, lab, drafts, fresh_server, caplog):
    output = lab.folder / "pushing"
    data = lab.folder / "answers.jsonl"
    keys = {"data__path": data, "data__eval_samples": 0}
    lab.train_here(output, train__push_every=20, push__to=f"[{fresh_server}]", **keys)
    assert run_directory.losses(output) == run_directory.losses(drafts["trained"].parent)
    records = run_directory.metrics(output)
    waits = {record["step"]: record["push_wait_s"] for record in records if "push_wait_s" in record}
    assert list(waits) == list(range(20, launching.STEPS + 1, 20))
    summary = run_directory.summary(output)
    outcomes = [record for record in (*records, *summary["last_pushes"]) if "push_version" in record]
    assert all(outcome["push_committed"] and outcome["push_s"] > 0 for outcome in outcomes)
    assert outcomes[-1]["push_version"] == launching.STEPS
    assert caplog.text.count(f"{fresh_server} gets the draft by ipc; not collective: sockets, slower") == 1
    assert "Pushes to running servers" in (output / "report.html").read_text()

    now = served(command_line, fresh_server)
    assert (now["version"], now["state"]) == (launching.STEPS, "committed")
    assert draft_server.traffic(fresh_server)["as_without"]
    push = ["push", "--target", lab.keys["target"], "--to", fresh_server, "--json", "--draft-model"]
    again = json.loads(command_line(*push, output / "draft").out)
    assert (again["version"], again["digest"]) == (launching.STEPS + 1, now["digest"])


@pytest.mark.slow
def test_a_server_that_is_lost_ends_no_run(lab, drafts):
    keys = {**lab.one_and_two, "train__steps": 100_000, "train__push_every": 5}
    with draft_server.serving(lab.keys["target"], drafts["fresh"]) as url:
        run = lab.start(lab.folder / "lost", push__to=f"[{url}]", **keys)
        run.until(lambda: any("serving_version" in record for record in run_directory.metrics(run.output)))
    log = run.output / "logs" / "trainer-0.log"
    run.until(lambda: "was not committed" in log.read_text())
    run.train_on(20)
    assert "serving_version" in run_directory.metrics(run.output)[-1]
    # Where it is lost in the midst of a push, the reason is the rank's lost connection.
    assert re.search(f"was not committed; {re.escape(url)} (aborted|quarantined): .", log.read_text())
    run.kill_everything()  # it would train beside every test that follows


@pytest.mark.slow
def test_a_server_that_hangs_keeps_no_run_from_ending(lab, drafts):
    keys = {**lab.one_and_two, "train__steps": 100_000, "train__push_every": 2}
    with draft_server.serving(lab.keys["target"], drafts["fresh"]) as url:
        run = lab.start(lab.folder / "hanging", push__to=f"[{url}]", push__timeout_s=600, **keys)
        run.until(lambda: any("serving_version" in record for record in run_directory.metrics(run.output)))
        draft_server.traffic(url, "/hang")
        run.train_on(10)
        run.process.send_signal(signal.SIGINT)
        assert run.wait(LIMIT_S) == 130, run.story()


@pytest.mark.slow
def test_a_canary_reverts_a_version_that_is_worse_and_no_other(command_line, lab, drafts, caplog):
    keys = {
        "train__push_every": 10,
        "train__steps": 10,
        "push__canary_margin": 0.1,
        "push__canary_rounds": 200,
    }
    with draft_server.serving(lab.keys["target"], drafts["trained"]) as url:
        launching.until(lambda: (served(command_line, url)["rounds"] or 0) > 200)
        worse = {"draft__init_from": drafts["trained"], "train__lr": 0.5, "push__to": f"[{url}]"}
        lab.train_here(lab.folder / "worse", **keys, **worse)
        now = served(command_line, url)
        assert (now["state"], now["version"]) == ("reverted", None)
        assert "version 10 is reverted: acceptance length " in caplog.text
        verdict = run_directory.summary(lab.folder / "worse")["last_pushes"][-1]
        assert verdict["push_reverted"]
        assert verdict["push_acceptance_after"] < verdict["push_acceptance_before"] - 0.1

        equal = {"draft__init_from": drafts["trained"], "train__lr": 1e-9, "push__to": f"[{url}]"}
        launching.until(lambda: (served(command_line, url)["rounds"] or 0) > 200)
        lab.train_here(lab.folder / "equal", **keys, **equal)
        now = served(command_line, url)
        assert (now["state"], now["version"]) == ("committed", 11)  # version 10 is the one that was reverted
        verdict = run_directory.summary(lab.folder / "equal")["last_pushes"][-1]
        assert not verdict["push_reverted"]
