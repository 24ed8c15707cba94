"""Handle torch extensions that cannot be imported, such as torch-npu without CANN.

torch imports vendors' extensions by itself. An extension that fails makes every ``import torch`` fail, on
other hardware, too. docs/decisions/011 has the reasons for the measures in this module.
"""

from __future__ import annotations

import importlib
import os
import sys
from contextlib import suppress
from functools import cache
from importlib import metadata

from spec_core import Backend, plugins
from spec_core.errors import PluginError


def restart_where_torch_would_fail() -> None:
    """Restart this process with the variables of ``Backend.import_env``, unless all of them are set.

    Child processes inherit the variables.
    """
    if not _extensions():
        return
    wanted: dict[str, str] = {}
    for record in plugins.installed(Backend):
        with suppress(PluginError):  # a broken plugin is reported when it is loaded
            wanted |= plugins.load_record(Backend, record).import_env()
    if not wanted.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **wanted})


def hide_broken_extensions() -> None:
    """Make extensions that cannot be imported look as if they were not installed.

    Call it before transformers is imported, because transformers imports the installed extensions.
    """
    for extension in _extensions():
        try:
            importlib.import_module(extension.module)
        except ImportError:
            sys.modules[extension.module] = None  # type: ignore[assignment]  # Python's word for "not installed"


@cache
def _extensions() -> metadata.EntryPoints:
    """Return the installed extensions; to find them, the metadata of every distribution is read."""
    return metadata.entry_points(group="torch.backends")
