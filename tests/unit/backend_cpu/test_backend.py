"""CpuBackend where torch is not installed."""

from importlib import metadata

from spec_backend_cpu.backend import CpuBackend


def test_a_machine_without_torch_is_told_what_to_install(monkeypatch):
    def version(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    found = CpuBackend.probe()
    assert (found.ok, found.reason) == (False, "torch is not installed; pip install torch")
