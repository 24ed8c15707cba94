"""A working directory of traps: modules with the names of all others, which leave a trace where they are imported."""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

_OTHERS = ("sitecustomize", "usercustomize", "spec_core", "spec_processes", "spec_kit", "spec_trainer")
_TRAP = "with open({marker!r}, 'a') as marker: marker.write(__name__ + '\\n')\n"
_NOTE = """\
import importlib.machinery, importlib.util, os, sys
with open({starts!r}, "a") as starts:
    starts.write(repr((sys.flags.safe_path, sys.orig_argv[:6])) + "\\n")
others = [place for place in sys.path if place != os.path.dirname(__file__)]
if (shadowed := importlib.machinery.PathFinder.find_spec("sitecustomize", others)) is not None:
    shadowed.loader.exec_module(importlib.util.module_from_spec(shadowed))
"""


@dataclass(frozen=True)
class Traps:
    """Two folders: one to start commands in, one for PYTHONPATH that has each Python that starts noted."""

    directory: Path
    site: Path

    @classmethod
    def lay(cls, folder: Path) -> Traps:
        """Make both below ``folder``."""
        traps = cls(folder / "here", folder / "site")
        for made in (traps.directory, traps.site):
            made.mkdir(parents=True)
        modules = {*sys.stdlib_module_names, *metadata.packages_distributions(), *_OTHERS}
        for name in filter(str.isidentifier, modules):
            (traps.directory / f"{name}.py").write_text(_TRAP.format(marker=str(traps._marker)))
        (traps.site / "sitecustomize.py").write_text(_NOTE.format(starts=str(traps._starts)))
        traps._starts.touch()
        return traps

    @property
    def _marker(self) -> Path:
        return self.site / "imported"

    @property
    def _starts(self) -> Path:
        return self.site / "starts"

    def starts(self) -> list[tuple[bool, list[str]]]:
        """Every Python that has started: whether it leaves out its working directory, and its first words.

        One that was started with -I, which leaves it out, too, is not among them.
        """
        return [ast.literal_eval(line) for line in self._starts.read_text().splitlines()]

    def assert_untouched(self, command: list[str]) -> None:
        """Fail where a module of the directory was imported, or where a Python could have done that.

        ``command``: the first words of the command itself, which a user starts.
        """
        assert not self._marker.exists(), f"imported from the working directory: {self._marker.read_text()}"
        unsafe = [words for safe, words in self.starts() if not safe and not set(command) <= set(words)]
        assert not unsafe, f"started without PYTHONSAFEPATH, -P or -I: {unsafe}"
