"""Parts of vLLM's process that do not need vLLM."""

import pytest

from spec_backend_cpu.backend import CpuBackend
from spec_core import EngineContext
from spec_core.errors import EngineError
from spec_engine_vllm import process
from spec_engine_vllm.config import VllmConfig
from spec_engine_vllm.process import VllmProcess
from spec_kit.hosting import PlainMode
from spec_kit.targets.target_reader import read_target

POINTER = "RuntimeError: Engine core initialization failed. See root cause above."
LOGGED = "(EngineCore pid=7) ERROR [core.py:1] ValueError: no memory for 40960 tokens"


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        (POINTER, "ValueError: no memory for 40960 tokens"),
        (
            "its process ended with exit code 3",
            "its process ended with exit code 3: ValueError: no memory for 40960 tokens",
        ),
        (
            "vLLM's process EngineCore was killed by signal 9",
            "vLLM's process EngineCore was killed by signal 9",
        ),
    ],
)
def test_a_start_that_fails_gives_vllms_own_reason(tiny_llama, tmp_path, monkeypatch, told, reason) -> None:
    """A script in vLLM's place logs an error, then one that only points there, and tells what is ``told``."""
    (tmp_path / "fake_program.py").write_text(
        f"""
import sys
from spec_processes.spawn import channel_to_parent
print({LOGGED!r}, {POINTER!r}, sep="\\n", flush=True)
channel_to_parent(*sys.argv[1:]).send("failed", message={told!r})
"""
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(VllmProcess, "module", "fake_program")
    context = EngineContext(backend=CpuBackend(CpuBackend.Config()))
    with (
        VllmProcess(VllmConfig(), read_target(tiny_llama), context, PlainMode()) as failing,
        pytest.raises(EngineError) as caught,
    ):
        failing.wait_ready()
    assert str(caught.value) == f"vLLM did not start: {reason}"


def test_sockets_of_vllm_have_paths_that_sockets_can_have(monkeypatch, tmp_path) -> None:
    deep = tmp_path / ("x" * 60)
    deep.mkdir()
    monkeypatch.setattr(process.tempfile, "tempdir", str(deep))
    with process._socket_folder() as folder:
        assert len(f"{folder}/xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx") <= 107
    monkeypatch.setattr(process.tempfile, "tempdir", "/tmp")
    with process._socket_folder() as folder:
        assert folder.startswith("/tmp/spec-vllm-")
