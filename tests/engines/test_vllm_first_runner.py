"""A vLLM without its first model runner: the files of the installed one, except those that belong to this runner."""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from .vllm_here import needs_vllm

pytestmark = [*needs_vllm, pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.xdist_group("states")]
GONE = (
    "sample/rejection_sampler", "spec_decode/dflash", "spec_decode/eagle", "spec_decode/llm_base_proposer",
    "worker/cpu_model_runner", "worker/gpu_model_runner",
)  # fmt: skip
RIG = Path(__file__).parent
SCRIPT = """
import importlib, pkgutil, sys
from pathlib import Path
import spec_engine_vllm, spec_vllm_rig
from spec_core import Draft, plugins
from spec_engine_vllm.serving import VllmServing
from spec_kit.targets import read_target
for module in pkgutil.iter_modules(spec_engine_vllm.__path__, "spec_engine_vllm."):
    importlib.import_module(module.name)
spec_vllm_rig.install()
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
print("second runner captures", hasattr(GPUModelRunner.load_model, "_spec_capture"))
print("sampler", spec_engine_vllm.sampler_check.SamplerCheck().ensure_sampler_is_right())
plugin, target = plugins.load(Draft, "peagle"), read_target(Path(sys.argv[1]))
print("P-EAGLE", VllmServing().availability(target, plugin(plugin.Config(name="peagle"))).reason)
import vllm.v1.worker.gpu_model_runner
"""


def test_only_what_needs_the_first_runner_misses_it(llama, tmp_path) -> None:
    """Every module is imported, also where states shall be captured; so is the rig of the tests on a GPU."""
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations
    real = Path(spec.submodule_search_locations[0])
    gone = [real / "v1" / f"{name}.py" for name in GONE]
    assert all(file.is_file() for file in gone)
    shutil.copytree(
        real,
        tmp_path / "vllm",
        copy_function=os.symlink,
        ignore=lambda folder, names: [name for name in names if Path(folder, name) in gone],
    )
    paths = [tmp_path, RIG / "vllm_rig", RIG / "rig_streams", os.environ.get("PYTHONPATH", "")]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "SPEC_LIVE_REQUESTS": '{"share": 1.0, "states_bytes": 65536}',
        "SPEC_TEST_DRAFTS": str(tmp_path / "drafts"),
        "SPEC_TEST_SAMPLER": str(tmp_path),
    }
    words = [sys.executable, "-c", SCRIPT, str(llama)]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert "No module named 'vllm.v1.worker.gpu_model_runner'" in done.stderr, done.stderr[-3000:]
    *_, second, sampler, peagle = done.stdout.splitlines()
    assert (second, sampler) == ("second runner captures True", "sampler True")
    assert "needs vLLM's first model runner, and the installed vLLM has the second one only" in peagle
