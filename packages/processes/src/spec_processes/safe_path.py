"""The working directory is none of the places that a command imports from: anybody may have put a module there."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""Environment of a Python that is to leave its working directory, and its script's folder, out of ``sys.path``."""


def leave_out_working_directory() -> None:
    """Import nothing from the working directory from now on, in this process and in all that it leads to.

    Whoever starts a Python lets it inherit the variable: ``multiprocessing`` with its resource tracker, torch's
    compiler, Ray, vLLM, SGLang. Some pass ``sys.path`` on, too.
    """
    os.environ.update(SAFE_PATH)
    if sys.flags.safe_path:
        return
    with suppress(FileNotFoundError):  # a working directory that was removed
        if sys.path[0] in ("", os.getcwd()):
            del sys.path[0]
