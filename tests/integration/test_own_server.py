"""``spec-trainer follow --serve ENGINE`` starts a server, starts it again, and leaves nothing of it behind."""

import os
import random
import signal
import socket
import subprocess
from pathlib import Path

import psutil
import pytest

from spec_kit.hosting import DRAFT_TOKEN_VARIABLE
from spec_kit.live_traffic import LIVE_REQUESTS_VARIABLE

from ..distributions import write_distribution
from ..free_port import free_port
from . import draft_server, launching, live_server, run_directory

_ROOT = Path(__file__).parents[2]
_ENTRY_POINTS = """\
[spec_core.engines]
serving = serving_engine:ServingEngine
failing = serving_engine:FailingEngine
"""


@pytest.fixture(autouse=True)
def _environment(tmp_path, monkeypatch) -> None:
    """The plugin, installed as a distribution, and what the server of the tests reads."""
    site = write_distribution(tmp_path / "site", "serving-engine", _ENTRY_POINTS)
    found = [str(site), str(Path(__file__).parent / "serving_engine"), str(_ROOT)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(found))
    monkeypatch.setenv(DRAFT_TOKEN_VARIABLE, draft_server.TOKEN)
    monkeypatch.setenv(LIVE_REQUESTS_VARIABLE, '{"share": 1.0}')


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def words(make_target, port, tmp_path) -> list[str]:
    """A run from fresh weights whose server listens at ``port``."""
    target = make_target("llama", num_hidden_layers=4)
    keys = [f"target={target}", f"output={tmp_path / 'run'}", f"follow.serve.address=127.0.0.1:{port}"]
    keys += ["draft.layers=[1,2,3]", "draft.num_steps=2", "train.global_batch_tokens=256", "train.lr=1e-3"]
    return [
        "follow", "--serve", "serving", *keys, "data.eval_samples=0", "follow.every=8", "follow.poll_s=0.05",
    ]  # fmt: skip


def ask(port: int, num: int, seed: int) -> None:
    draw = random.Random(seed)
    asked = [[draw.randrange(97) for _ in range(6)] for _ in range(num)]
    assert len(live_server.ask(f"http://127.0.0.1:{port}", asked)["answers"]) == num


def listens(port: int) -> bool:
    with socket.socket() as client:
        client.settimeout(1)
        return client.connect_ex(("127.0.0.1", port)) == 0


def until_it_answers(log: Path, command: subprocess.Popen[bytes]) -> None:
    launching.until(lambda: "answers" in log.read_text() or command.poll() is not None)
    assert command.poll() is None, log.read_text()


def servers(port: int) -> list[psutil.Process]:
    """Processes whose command line has the server's program and its port."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if {"tests.integration.live_server", str(port)} <= set(process.info["cmdline"] or ())
    ]


@pytest.mark.slow
def test_a_server_is_started_with_the_fresh_draft_started_again_and_ended(words, port, tmp_path) -> None:
    log, output = tmp_path / "log", tmp_path / "run"
    with launching.running([*words, "--requests", "24"], log) as command:
        until_it_answers(log, command)
        ask(port, 8, 1)
        (server,) = servers(port)
        assert str(output / "decoded" / "draft-0") in server.cmdline()
        server.send_signal(signal.SIGKILL)
        launching.until(lambda: "it is started again" in log.read_text())
        launching.until(lambda: listens(port))
        ask(port, 24, 2)
        assert command.wait(launching.START_S) == 0, log.read_text()
    assert not servers(port)
    assert run_directory.summary(output)["requests"] >= 24
    assert str(port) in (output / "logs" / "server.log").read_text(), "the server's output"
    assert "was killed by signal 9" in log.read_text()
    for file in (file for file in output.rglob("*") if file.is_file()):
        assert draft_server.TOKEN.encode() not in file.read_bytes()


@pytest.mark.slow
def test_a_killed_command_and_an_interrupted_one_leave_no_server(words, port, tmp_path) -> None:
    for number, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 130)):
        log = tmp_path / f"log-{number}"
        with launching.running(words, log) as command:
            until_it_answers(log, command)
            found = servers(port)
            command.send_signal(number)
            assert command.wait(launching.START_S) == code
            assert found
            assert not psutil.wait_procs(found, 30)[1]


def test_a_server_that_does_not_start_ends_the_command_in_one_line(
    words, tmp_path, monkeypatch, command_line
) -> None:
    for site in os.environ["PYTHONPATH"].split(os.pathsep)[:2]:
        monkeypatch.syspath_prepend(site)
    outcome = command_line(*words, "follow.serve.engine=failing")
    assert outcome.code == 1
    (line,) = [line for line in outcome.err.splitlines() if "spec-trainer: error:" in line]
    assert line.endswith(
        "the server of follow.serve ended with exit code 1 before it answered: MemoryError: no room for the "
        f"target; see {tmp_path / 'run' / 'logs' / 'server.log'}"
    )


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            ["follow.serve.engine=hf"],
            "follow.serve.engine=hf: this engine has no server that follow can start",
        ),
        ([], "follow.serve.engine=vllm: vllm is not installed"),
        (["follow.serve.engine=none"], "no engine plugin is called 'none'"),
        (["follow.serve.address=127.0.0.1:0"], "clients need to know the port; give one above 0"),
        (["follow.serve.arguments=--a 'b"], "No closing quotation; expected words of a shell"),
        (["follow.serve.arguments=a \\"], "No escaped character; expected words of a shell"),
        (['follow.serve.arguments="a\\0b"'], "holds the character NUL, which no value can have"),
        (["follow.serve.address=here"], "'here' is not host:port"),
        (["follow.serve.address=203.0.113.7:8000"], "give host:port of this host, with a free port"),
    ],
)
def test_a_server_that_cannot_be_started_is_refused_before_anything_is_written(
    keys, message, words, tmp_path, command_line
) -> None:
    outcome = command_line(
        *[word for word in words if word not in ("--serve", "serving")], "--serve", "vllm", *keys
    )
    assert (outcome.code, message in outcome.error) == (2, True), outcome.error
    assert not (tmp_path / "run").exists()
