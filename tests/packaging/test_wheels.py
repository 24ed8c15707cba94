"""Wheels as a user installs them: their metadata, their contents, and the wheels at work in a clean environment."""

import configparser
import json
import re
import shutil
import subprocess
import tomllib
import zipfile
from pathlib import Path

import pytest

from .release import metadata

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
OURS = {name.replace("_", "-") for name in _PROJECT["tool"]["importlinter"]["root_packages"]}
THIRD_PARTIES = sorted(file.parent for file in ROOT.glob("tests/plugins/*/pyproject.toml"))


def read(wheel: Path, name: str) -> str:
    """A file of the wheel's .dist-info; empty where there is none."""
    with zipfile.ZipFile(wheel) as archive:
        found = [entry for entry in archive.namelist() if entry.endswith(f".dist-info/{name}")]
        return archive.read(found[0]).decode() if found else ""


def entry_points_of(wheel: Path) -> dict[str, dict[str, str]]:
    parser = configparser.ConfigParser(delimiters=("=",))
    parser.read_string(read(wheel, "entry_points.txt"))
    return {section: dict(parser[section]) for section in parser.sections()}


def requirements_of(wheel: Path) -> set[str]:
    """Names of the required distributions, extras left out."""
    required = metadata(wheel).get_all("Requires-Dist") or []
    return {re.match(r"[\w-]+", word)[0] for word in required if "extra ==" not in word}


def imported_by(wheel: Path) -> set[str]:
    """Names of the distributions that a third party's modules import: ours, torch and transformers."""
    with zipfile.ZipFile(wheel) as archive:
        sources = [archive.read(name).decode() for name in archive.namelist() if name.endswith(".py")]
    packages = re.findall(r"^ *(?:from|import) (\w+)", "\n".join(sources), re.MULTILINE)
    return {package.replace("_", "-") for package in packages} & {*OURS, "torch", "transformers"}


def declared_entry_points(name: str) -> dict[str, dict[str, str]]:
    """Return the entry points that the distribution's own pyproject declares."""
    for file in ROOT.glob("*/*/pyproject.toml"):
        project = tomllib.loads(file.read_text())["project"]
        if project["name"] == name:
            scripts = {"console_scripts": project["scripts"]} if "scripts" in project else {}
            return {**project.get("entry-points", {}), **scripts}
    raise AssertionError(f"no member of the workspace is called {name}")


def test_distributions_are_of_one_version(wheels):
    assert wheels.keys() == OURS | {folder.name for folder in THIRD_PARTIES}
    assert len({metadata(wheels[name])["Version"] for name in OURS}) == 1


@pytest.mark.parametrize("name", sorted(OURS))
def test_wheel_is_typed_and_licensed_and_holds_only_its_package(wheels, name):
    package = name.replace("-", "_")
    with zipfile.ZipFile(wheels[name]) as archive:
        files = archive.namelist()
    assert f"{package}/py.typed" in files
    assert {file.partition("/")[0].split("-")[0] for file in files} == {package}
    assert not [file for file in files if "__pycache__" in file]
    assert metadata(wheels[name])["License-Expression"] == "Apache-2.0"
    assert read(wheels[name], "licenses/LICENSE") == (ROOT / "LICENSE").read_text()


def test_no_member_holds_a_link():
    """A link that leads out of its folder breaks the sdist."""
    members = [file.parent for file in ROOT.glob("*/*/pyproject.toml")]
    assert [file for member in members for file in member.rglob("*") if file.is_symlink()] == []


@pytest.mark.parametrize("name", sorted(OURS))
def test_entry_points_are_those_that_the_sources_declare(wheels, name):
    assert entry_points_of(wheels[name]) == declared_entry_points(name)


def test_built_ins_take_the_same_road_as_third_parties(wheels):
    groups = {group: set(names) for name in OURS for group, names in entry_points_of(wheels[name]).items()}
    assert groups.keys() >= {
        "spec_core.backends", "spec_core.drafts", "spec_core.engines", "spec_core.launchers",
        "spec_core.optimizers", "spec_core.strategies", "spec_core.trackers", "spec_core.weight_transports",
    }  # fmt: skip
    parts = {"spec_core.kernels", "spec_core.target_types"}
    for folder in THIRD_PARTIES:
        assert entry_points_of(wheels[folder.name]).keys() < groups.keys() | parts
        assert requirements_of(wheels[folder.name]) == imported_by(wheels[folder.name])


@pytest.mark.parametrize("name", ["spec-backend-ascend", "spec-backend-cuda"])
def test_backend_brings_the_command(wheels, name):
    assert {"spec-core", "spec-trainer"} <= requirements_of(wheels[name])


def test_command_brings_what_runs_anywhere(wheels):
    elsewhere = {
        *("spec-backend-ascend", "spec-backend-cuda", "spec-strategy-megatron", "spec-launcher-ray"),
        *("spec-testing", "spec-trainer"),
    }
    assert requirements_of(wheels["spec-trainer"]) & OURS == OURS - elsewhere


@pytest.mark.parametrize("extra", ["vllm", "sglang", "llamacpp", "cuda", "ascend", "megatron"])
def test_extra_of_the_command_brings_the_plugin(wheels, extra):
    required = metadata(wheels["spec-trainer"]).get_all("Requires-Dist")
    kind = {"cuda": "backend", "ascend": "backend", "megatron": "strategy"}.get(extra, "engine")
    assert [
        word for word in required if word.startswith(f"spec-{kind}-{extra}") and f"extra == '{extra}'" in word
    ]


VENDORS = ("cuda", "nvidia", "torch-npu", "triton")


WITHOUT_TORCH = {"spec-core", "spec-processes", "spec-launcher-local", "spec-launcher-ray", "spec-trackers"}


@pytest.mark.parametrize("name", sorted(WITHOUT_TORCH))
def test_torch_is_not_required(wheels, name):
    """Nor by what these require."""
    assert requirements_of(wheels[name]) - {"pydantic", "h11", "psutil"} <= WITHOUT_TORCH


@pytest.mark.parametrize("name", sorted(OURS - WITHOUT_TORCH))
def test_torch_is_required_without_a_vendor(wheels, name):
    required = metadata(wheels[name]).get_all("Requires-Dist")
    assert "torch>=2.11" in required
    assert name == "spec-backend-cuda" or not [word for word in required if word.startswith(VENDORS)]


# Each test of the suite of engine `remote` starts a process that imports Transformers; `serial` has no KV cache.
FEW = (
    "not (TestRemoteEngine or TestSerialEngine) or e1_ or e4_samples_follow or e4_greedy_with or e4_samples_with "
    "or e5_ or e8_ or e14_ or u3_"
)


@pytest.mark.timeout(900)
def test_third_parties_pass_the_suites_in_a_clean_environment(run, clean_python, tmp_path):
    """All of them in one go: torch is imported once for each worker."""
    for folder in THIRD_PARTIES:
        shutil.copytree(folder / "tests", tmp_path / folder.name)
    options = ["-v", "-p", "no:cacheprovider", "--import-mode=importlib", "-W", "error", "-k", FEW]
    spread = ["-n", "2", "--dist", "loadfile"]
    report = run(clean_python, "-m", "pytest", *options, *spread, tmp_path, cwd=tmp_path)
    assert set(re.findall(r"PASSED ([\w-]+)/", report)) == {folder.name for folder in THIRD_PARTIES}
    file = run(clean_python, "-c", "import spec_core; print(spec_core.__file__)").strip()
    assert not Path(file).is_relative_to(ROOT)


def test_command_of_a_clean_environment_lists_the_third_parties(run, clean_python, tmp_path):
    command = clean_python.parent / "spec-trainer"
    rows = json.loads(run(command, "plugins", "--json", cwd=tmp_path))
    found = {row["distribution"]: row["status"] for row in rows}
    assert {found[folder.name] for folder in THIRD_PARTIES} == {"ok"}
    assert found["spec-backend-cpu"] == "ok"
    # Without a GPU, an NPU or an engine installed, what needs them says so; nothing is broken.
    assert set(found.values()) == {"ok", "unavailable"}
    reasons = {row["name"]: row["reason"] for row in rows if row["status"] == "unavailable"}
    assert reasons.keys() <= {"cuda", "ascend", "vllm", "sglang", "llamacpp", "megatron"}
    assert all(reasons.values())


def test_without_torch_npu_the_ascend_backend_says_what_to_install(run, clean_python, tmp_path):
    run(clean_python, "-c", "import torch, spec_backend_ascend.backend", cwd=tmp_path)
    words = [clean_python.parent / "spec-trainer", "check", "--backend", "ascend"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert "detail: 'torch-npu is not installed: pip install torch-npu'" in done.stdout
