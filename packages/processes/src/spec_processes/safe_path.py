"""Remove the working directory from the import path, because other users may have put modules there."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""Environment variable that makes Python leave its working directory and script folder out of
``sys.path``."""


def leave_out_working_directory() -> None:
    """Import nothing from the working directory from now on, in this process and its descendants.

    Every Python process that ``multiprocessing``, torch's compiler, Ray, vLLM or SGLang starts inherits the
    environment variable PYTHONSAFEPATH. Some of these programs pass ``sys.path`` on, too.
    """
    os.environ.update(SAFE_PATH)
    if sys.flags.safe_path:
        return
    with suppress(FileNotFoundError):  # a working directory that was removed
        if sys.path[0] in ("", os.getcwd()):
            del sys.path[0]
