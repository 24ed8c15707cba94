"""The process that an engine's program lives in. The program is a script here: how it ends is what matters."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from spec_backend_cpu.backend import CpuBackend
from spec_core import EngineConfig, EngineContext
from spec_core.errors import DataError, DeadlineExceeded, EngineError
from spec_core.records import AcceptanceCounters, FeatureSchema, GenerationRequest, SamplingParams
from spec_kit.hosting import CaptureMode, EngineSubprocess, PlainMode, engine_subprocess, then

LIMIT_S = 30.0
PLAIN = PlainMode()
_BEGIN = """
import sys, time
from spec_processes.spawn import channel_to_parent
channel = channel_to_parent(*sys.argv[1:])
records = channel.messages()
order = next(records)
"""


class Script(EngineSubprocess):
    program = "Script"
    module = "fake_program"
    extension = "its extension"

    def prefill(self, requests):
        return self.ask("run", names=[request.destinations for request in requests])

    def decode(self, request, sampling):
        return self.ask("run", seed=request.seed)

    def acceptance(self) -> AcceptanceCounters:
        return AcceptanceCounters()

    def left_files(self, pids):
        return [Path(file.format(pid=pids[0])) for file in self.ready.get("files", ())]


@pytest.fixture
def start(tmp_path) -> Callable[..., Script]:
    """``start(script)``: a process that runs ``script`` once it has its order."""
    running: list[Script] = []
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }

    def start(
        script: str,
        start_s: float = LIMIT_S,
        peer_s: float = LIMIT_S,
        begin: str = _BEGIN,
        mode: object = PLAIN,
    ) -> Script:
        (tmp_path / "fake_program.py").write_text(begin + script)
        context = EngineContext(backend=CpuBackend(CpuBackend.Config()), start_s=start_s, peer_s=peer_s)
        running.append(Script(EngineConfig(), context, mode, {"word": "hello"}, env))
        return running[-1]

    yield start
    for one in running:
        one.close()
        one.close()


def test_the_order_arrives_and_questions_are_answered_by_key(start) -> None:
    script = """
channel.send("ready")
first, second = next(records), next(records)
channel.send("refused", key=second["key"], message="too long")
channel.send("done", key=first["key"], answers=[order["arguments"]["word"], order["peer_s"]])
next(records, None)
"""
    running = start(script)
    running.wait_ready()
    first, second = running.ask("run"), running.ask("run")
    with pytest.raises(EngineError, match=r"^Script refused a request: too long$"):
        second.result(LIMIT_S)
    assert first.result(LIMIT_S)["answers"] == ["hello", LIMIT_S]
    running.health()


def test_a_start_that_fails_gives_the_last_error_of_the_log(start) -> None:
    script = """
print("worker: torch.OutOfMemoryError: no 40 GiB", "and that was that", sep="\\n", flush=True)
sys.exit(3)
"""
    with pytest.raises(EngineError, match=r"^Script did not start: torch.OutOfMemoryError: no 40 GiB$"):
        start(script).wait_ready()


def test_the_reported_reason_is_used_where_the_log_has_none(start) -> None:
    with pytest.raises(EngineError, match=r"^Script did not start: TypeError: no such argument$"):
        start('channel.send("failed", message="TypeError: no such argument")').wait_ready()


def test_a_program_without_the_extension_that_captures_is_told(start, monkeypatch) -> None:
    monkeypatch.setattr(engine_subprocess, "_CONNECTED_S", 0.2)
    schema = FeatureSchema(layers=(0,), hidden_size=8, dtype="float32")
    running = start('channel.send("ready"); next(records, None)', mode=CaptureMode(schema))
    with pytest.raises(EngineError, match=r"^Script started without its extension$"):
        running.wait_ready()


def test_a_start_that_hangs_ends_at_its_deadline(start) -> None:
    with pytest.raises(DeadlineExceeded, match=r"start_s=0\.5"):
        start("time.sleep(60)", start_s=0.5).wait_ready()


def test_a_death_is_the_end_of_what_runs(start) -> None:
    script = """
channel.send("ready")
next(records)
import os, signal
os.kill(os.getpid(), signal.SIGKILL)
"""
    running = start(script)
    running.wait_ready()
    running.health()
    with pytest.raises(EngineError, match=r"^Script has ended: its process was killed by signal 9$"):
        running.ask("run").result(LIMIT_S)
    with pytest.raises(EngineError, match="killed by signal 9"):
        running.health()
    with pytest.raises(EngineError, match="killed by signal 9"):
        running.ask("run").result(LIMIT_S)
    assert "killed by signal 9" in str(running.death())


def test_drain_waits_for_answers_in_progress(start) -> None:
    script = """
channel.send("ready")
key = next(records)["key"]
time.sleep(0.3)
channel.send("done", key=key, ids=[7], gaps=[0.5])
next(records, None)
"""
    running = start(script)
    running.wait_ready()
    answer = running.generate(GenerationRequest(prompt=[5]), SamplingParams(max_new_tokens=1))
    running.drain()
    assert answer.done()
    assert answer.result().token_ids == (7,)


def test_silence_shows_in_health(start) -> None:
    running = start('channel.send("ready"); time.sleep(60)', peer_s=0.3)
    running.wait_ready()
    time.sleep(0.5)
    with pytest.raises(EngineError, match=r"Script has been silent for timeouts.peer_s=0.3"):
        running.health()


def test_heartbeats_are_no_silence(start) -> None:
    running = start('channel.keep_alive(order["peer_s"]); channel.send("ready"); time.sleep(60)', peer_s=0.5)
    running.wait_ready()
    time.sleep(0.8)
    running.health()


def test_a_closed_process_leaves_neither_children_nor_files(start, tmp_path) -> None:
    script = f"""
import os, subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
mine = "{tmp_path}/board-%d" % os.getpid()
open(mine, "w").close()
channel.send("ready", child=child.pid, files=["{tmp_path}/board-{{pid}}"])
time.sleep(60)
"""
    running = start(script)
    running.wait_ready()
    pid = running.ready["child"]
    assert psutil.pid_exists(pid)
    assert len(list(tmp_path.glob("board-*"))) == 1
    waiting = running.ask("run")
    running.close()
    with pytest.raises(EngineError, match="Script was closed"):
        waiting.result(0)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert list(tmp_path.glob("board-*")) == []


_PROGRAM = """
import asyncio
from spec_core.errors import DataError
from spec_kit.hosting import EngineLink

async def echo(message):
    if message["word"] == "image":
        raise DataError("an image has changed")
    if message["word"] == "wrong":
        raise ValueError("no such\\nword")
    if message["word"] == "wrapped":
        raise RuntimeError from ValueError("its cause")
    return {"word": message["word"], "device": link.device_type}

async def sleep(message):
    begun.append(message["key"])
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        ended.append(message["key"])
        raise

async def count(message):
    return {"begun": begun, "ended": ended}

async def stop(message):
    global broken
    broken = True
    raise RuntimeError("the program is broken")

async def check():
    return broken

broken, begun, ended = False, [], []
with EngineLink() as link:
    assert link.arguments == {"word": "hello"}
    link.ready(files=[])
    asyncio.run(link.serve({"echo": echo, "sleep": sleep, "count": count, "stop": stop}, check, lambda: broken))
"""


def test_a_program_serves_requests_refuses_some_and_reports_its_end(start):
    running = start(_PROGRAM, peer_s=1.0, begin="")
    running.wait_ready()
    refused, answered = running.ask("echo", word="wrong"), running.ask("echo", word="right")
    assert (answered.result(LIMIT_S)["word"], answered.result()["device"]) == ("right", "cpu")
    with pytest.raises(EngineError, match=r"^Script refused a request: ValueError: no such word$"):
        refused.result(LIMIT_S)
    with pytest.raises(EngineError, match=r"^Script refused a request: ValueError: its cause$"):
        running.ask("echo", word="wrapped").result(LIMIT_S)
    with pytest.raises(DataError, match=r"^an image has changed$"):
        running.ask("echo", word="image").result(LIMIT_S)
    with pytest.raises(EngineError, match=r"^Script refused a request: KeyError: 'unheard of'$"):
        running.ask("unheard of").result(LIMIT_S)
    time.sleep(1.5)  # signs of life come by themselves
    running.health()
    with pytest.raises(EngineError, match=r"^RuntimeError: the program is broken$"):
        running.ask("stop").result(LIMIT_S)


def wait_until(running, name, expected):
    """Ask the program for its list of this name until it is as expected."""
    end = time.monotonic() + LIMIT_S
    while (found := running.ask("count").result(LIMIT_S)[name]) != expected:
        assert time.monotonic() < end, found
        time.sleep(0.01)


def test_a_cancelled_request_ends_in_the_program_and_no_other(start):
    running = start(_PROGRAM, begin="")
    running.wait_ready()
    answered, unwanted, other = running.ask("echo", word="right"), running.ask("sleep"), running.ask("sleep")
    assert answered.result(LIMIT_S)["word"] == "right"
    assert not answered.cancel()
    wait_until(running, "begun", [1, 2])
    assert then(unwanted, dict).cancel()
    wait_until(running, "ended", [1])
    assert not other.done()
