"""The probe's findings and words, on hosts made of files; no torch_npu, no CANN."""

import importlib.util

import pytest

from spec_backend_ascend import acl, hccl, host
from spec_backend_ascend.backend import AscendBackend


@pytest.fixture
def machine(tmp_path):
    """A root folder with a driver and a toolkit."""
    driver = tmp_path / "usr/local/Ascend/driver"
    driver.mkdir(parents=True)
    (driver / "version.info").write_text("Version=25.3.rc1\nascendhal_version=7.35\n")
    toolkit = tmp_path / "toolkit"
    (toolkit / "aarch64-linux").mkdir(parents=True)
    (toolkit / "aarch64-linux/ascend_toolkit_install.info").write_text("package_name=x\nversion=8.3.RC1\n")
    return tmp_path, {"ASCEND_HOME_PATH": str(toolkit)}


def test_versions_of_driver_and_cann_are_read_from_their_files(machine):
    found = host.versions(*machine)
    assert (found["driver"], found["cann"]) == ("25.3.rc1", "8.3.RC1")


def test_the_driver_is_where_its_installation_says(machine):
    root, environ = machine
    elsewhere = root / "opt/hw/driver"
    elsewhere.mkdir(parents=True)
    (elsewhere / "version.info").write_text("Version=24.1.0\n")
    (root / "etc").mkdir()
    (root / "etc/ascend_install.info").write_text("Driver_Install_Path_Param=/opt/hw\n")
    assert host.versions(root, environ)["driver"] == "24.1.0"


def test_what_is_not_there_has_no_version(tmp_path):
    assert set(host.versions(tmp_path, {})) <= {"torch", "torch-npu"}
    assert host.versions(tmp_path, {"ASCEND_HOME_PATH": str(tmp_path)}).get("cann") is None


@pytest.mark.parametrize(
    ("driver", "cann", "shared"),
    [
        ("25.3.rc1", "8.3.RC1", True),
        ("26.0.0", "9.0.0", True),
        ("25.2.3", "8.3.RC1", False),
        ("25.3.rc1", "8.2.RC2", False),
        ("25.10.0", "8.10.0", True),
        ("", "8.3.RC1", False),
        ("unknown", "8.3.RC1", False),
    ],
)
def test_memory_is_shared_from_certain_releases_on(driver, cann, shared):
    assert host.shares_memory({"driver": driver, "cann": cann}) is shared


def loads(monkeypatch, *missing):
    """Everything is installed but ``missing`` modules and libraries."""
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name in missing else importlib.machinery.ModuleSpec(name, None),
    )
    for module in (acl, hccl):
        load = "acl_library" if module is acl else "hccl_library"
        monkeypatch.setattr(module, load, lambda name=module.LIBRARY: _open(name, missing))


def _open(name, missing):
    if name in missing:
        raise OSError(f"{name}: cannot open shared object file")


@pytest.mark.parametrize(
    ("missing", "remedy"),
    [
        ("torch", "pip install torch"),
        ("torch_npu", "pip install torch-npu"),
        ("libascendcl.so", "set_env.sh"),
        ("libhccl.so", "set_env.sh"),
    ],
)
def test_what_is_missing_is_said_in_one_line_with_its_remedy(monkeypatch, missing, remedy):
    loads(monkeypatch, missing)
    reason = host.missing()
    assert remedy in reason
    assert "\n" not in reason


def test_without_cann_the_way_around_a_broken_import_is_said(monkeypatch):
    loads(monkeypatch, "libascendcl.so")
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in host.missing()


def test_a_host_without_a_card_and_an_empty_list_of_cards_are_told_apart(monkeypatch):
    loads(monkeypatch)
    monkeypatch.setattr(host, "num_devices", lambda: 0)
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    assert "npu-smi" in host.missing()
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "")
    assert "unset it" in host.missing()
    monkeypatch.setattr(host, "num_devices", lambda: 8)
    assert host.missing() == ""


def test_torch_fails_of_torch_npu_where_that_is_installed_and_lacks_cann(monkeypatch):
    loads(monkeypatch, "libascendcl.so")
    assert host.breaks_torch()
    assert AscendBackend.import_env() == {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    loads(monkeypatch, "libascendcl.so", "torch_npu")
    assert not host.breaks_torch()
    assert AscendBackend.import_env() == {}
    loads(monkeypatch)
    assert not host.breaks_torch()


@pytest.mark.parametrize(
    ("extension", "fits"), [("2.13.0", True), ("2.13.0.post4", True), ("2.9.0", False), ("2.14.0rc1", False)]
)
def test_torch_npu_goes_with_the_torch_that_it_is_built_for(monkeypatch, extension, fits):
    installed = {"torch": "2.13.0+cpu", "torch-npu": extension}
    loads(monkeypatch)
    monkeypatch.setattr(host, "_distribution", installed.get)
    monkeypatch.setattr(host, "num_devices", lambda: 8)
    assert host.breaks_torch() is not fits
    assert host.missing().startswith("" if fits else f"torch-npu {extension} does not go with torch 2.13.0")
    assert bool(host.missing()) is not fits


def test_torch_npu_does_not_go_with_a_torch_for_cuda(monkeypatch, tmp_path):
    monkeypatch.setattr(host, "_distribution", lambda name: "2.13.0")
    spec = importlib.machinery.ModuleSpec("torch", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    loads(monkeypatch)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert not host.breaks_torch()
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libtorch_cuda.so").touch()
    assert host.breaks_torch()
    assert "built for CUDA" in host.missing()
