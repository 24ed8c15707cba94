"""torch imports the extensions of hardware vendors by itself. Where one cannot be loaded, as torch-npu without CANN,
every ``import torch`` of every process fails, of runs on other hardware too.

What is done about it: docs/decisions/011.
"""

from __future__ import annotations

import importlib
import os
import sys
from contextlib import suppress
from importlib import metadata

from spec_core import Backend, plugins
from spec_core.errors import PluginError


def restart_where_torch_would_fail() -> None:
    """The same command again, in this process's place, with what installed backends want in the environment of every
    process that imports torch (``Backend.import_env``). Children inherit it; where nothing is wanted nothing happens.
    """
    if not _extensions():
        return
    wanted: dict[str, str] = {}
    for record in plugins.installed(Backend):
        with suppress(PluginError):  # a broken plugin is told where it is asked for
            wanted |= plugins.load_record(Backend, record).import_env()
    if not wanted.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **wanted})


def hide_broken_extensions() -> None:
    """Before transformers is imported, which looks for extensions itself and imports what is installed: it finds none
    that cannot be imported."""
    for extension in _extensions():
        try:
            importlib.import_module(extension.module)
        except ImportError:
            sys.modules[extension.module] = None  # type: ignore[assignment]  # Python's word for "not installed"


def _extensions() -> metadata.EntryPoints:
    return metadata.entry_points(group="torch.backends")
