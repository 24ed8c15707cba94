"""Distributions that a test installs."""

import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from ...distributions import write_distribution

GOOD = """
    from spec_backend_cpu.backend import CpuBackend

    class Planted(CpuBackend):
        name = "planted"
"""


@pytest.fixture
def install(tmp_path, monkeypatch) -> Callable[..., Path]:
    """``install(distribution, source)``: makes a distribution of one module whose class ``Planted`` is the backend
    ``planted``, and puts it on the path. The module is called like the distribution."""

    def install(
        distribution: str, source: str = GOOD, name: str = "planted", group: str = "backends"
    ) -> Path:
        module = distribution.replace("-", "_")
        points = f"[spec_core.{group}]\n{name} = {module}:Planted\n"
        folder = write_distribution(tmp_path / distribution, distribution, points, "3.1")
        (folder / f"{module}.py").write_text(dedent(source))
        monkeypatch.syspath_prepend(folder)
        monkeypatch.delitem(sys.modules, module, raising=False)
        return folder

    return install
