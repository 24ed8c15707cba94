"""The table of plugins survives whatever a stranger's plugin does."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from spec_trainer.cli.commands import plugins as plugin_table

from .....distributions import write_distribution

PROBE = """\
from spec_backend_cpu.backend import CpuBackend
class Plugin(CpuBackend):
    name = __name__.removeprefix("stranger_")
    @classmethod
    def probe(cls):
        {wait}
        return super().probe()
"""
STRANGERS = {
    "fine": "from spec_backend_cpu.backend import CpuBackend\nclass Plugin(CpuBackend):\n    name = 'fine'\n",
    "crashing": "import os\nos._exit(7)\n",
    "hanging": "import time\ntime.sleep(600)\n",
    "slow": "import time\ntime.sleep(3)\n" + PROBE.format(wait="pass"),
    "waiting": PROBE.format(wait="import time; time.sleep(600)"),
    "broken": "import no_such_module\n",
    "exiting": "import sys\nsys.exit(0)\n",
    "dated": "from spec_backend_cpu.backend import CpuBackend\nclass Plugin(CpuBackend):\n    name = 'dated'\n"
    "    def transport(self, placement):\n        from spec_kit.streams import LargePool\n        return LargePool\n",
    "careful": "from typing import TYPE_CHECKING\nfrom spec_backend_cpu.backend import CpuBackend\n"
    "if TYPE_CHECKING:\n    from spec_kit.streams import LargePool\n"
    "try:\n    from spec_core import Poll\nexcept ImportError:\n    from spec_core import Backend\n"
    "class Plugin(CpuBackend):\n    name = 'careful'\n"
    "    def other(self):\n        from spec_kit.hosting import FeatureExporter\n        import spec_core.records\n",
    "talking": "import atexit\nprint('hello', end='')\natexit.register(print, 'bye')\n"
    "from spec_backend_cpu.backend import CpuBackend\nclass Plugin(CpuBackend):\n    name = 'talking'\n",
}


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``install(*names)``: distributions of third parties, one backend each, as if installed."""

    def install(*names: str) -> None:
        for name in names:
            (tmp_path / f"stranger_{name}.py").write_text(STRANGERS[name])
            points = f"[spec_core.backends]\n{name} = stranger_{name}:Plugin\n"
            write_distribution(tmp_path, f"stranger-{name}", points)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))

    return install


def test_every_stranger_has_its_row(install):
    install("fine", "crashing", "broken")
    rows = {row["name"]: row for row in plugin_table.plugin_rows()}
    assert (rows["fine"]["status"], rows["fine"]["distribution"], rows["fine"]["version"]) == (
        "ok", "stranger-fine", "1.0"
    )  # fmt: skip
    assert rows["crashing"]["status"] == rows["broken"]["status"] == "broken"
    assert "exit code 7" in rows["crashing"]["reason"]
    assert "no_such_module" in rows["broken"]["reason"]
    assert rows["cpu"]["status"] == "ok"


@pytest.mark.parametrize(
    ("name", "what", "import_s"), [("waiting", "probe", 120.0), ("hanging", "import", 1.0)]
)
def test_who_has_not_answered_in_time_is_not_called_broken(install, monkeypatch, name, what, import_s):
    install(name)
    monkeypatch.setattr(plugin_table, "_PROBE_S", 1)
    monkeypatch.setattr(plugin_table, "_IMPORT_S", import_s)
    (row,) = [row for row in plugin_table.plugin_rows() if row["name"] == name]
    assert (row["status"], row["reason"]) == ("unknown", f"its {what} took longer than 1 s on this host")


def test_the_time_of_an_import_is_not_the_probes(install, monkeypatch):
    install("slow")
    monkeypatch.setattr(plugin_table, "_PROBE_S", 2)
    (row,) = [row for row in plugin_table.plugin_rows() if row["name"] == "slow"]
    assert (row["status"], row["reason"]) == ("ok", "")


def test_a_plugin_that_exits_or_prints_has_its_row(install):
    install("exiting", "talking")
    rows = {row["name"]: row for row in plugin_table.plugin_rows()}
    assert rows["talking"]["status"] == "ok"
    assert (rows["exiting"]["status"], rows["exiting"]["distribution"]) == ("broken", "stranger-exiting")
    assert rows["exiting"]["reason"].endswith("does not import (stranger_exiting:Plugin): SystemExit: 0")


def test_an_import_in_a_function_of_what_the_libraries_lack_is_broken(install, tmp_path):
    install("dated", "careful")
    rows = {row["name"]: row for row in plugin_table.plugin_rows()}
    assert (rows["careful"]["status"], rows["careful"]["reason"]) == ("ok", "")
    assert rows["dated"]["status"] == "broken"
    assert rows["dated"]["reason"] == (
        f"backend 'dated' of stranger-dated 1.0: {tmp_path}/stranger_dated.py:5 imports "
        "spec_kit.streams.LargePool, which does not exist"
    )


def test_an_entry_point_of_a_misspelt_group_has_a_row(install, tmp_path):
    install("fine")
    entries = tmp_path / "stranger_fine-1.0.dist-info" / "entry_points.txt"
    entries.write_text(entries.read_text().replace("backends", "trackerz"))
    row = plugin_table.plugin_rows()[-1]
    assert (row["kind"], row["name"], row["distribution"]) == ("spec_core.trackerz", "fine", "stranger-fine")
    assert row["reason"] == "there is no such kind of plugin (did you mean 'spec_core.trackers'?)"


def test_table_shows_every_row(capsys):
    rows = [{"kind": "backend", "name": "one", "api": None}, {"kind": "draft", "name": "two", "api": 1}]
    plugin_table.print_table(rows)
    text = capsys.readouterr().out
    assert all(word in text for word in ("kind", "one", "two", "draft"))
    assert "None" not in text
