"""Write an unexpected error's traceback to a file, and name the file in the one-line error message."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spec_core.errors import RunError, SpecError
from spec_core.foreign import cause
from spec_core.plugin_faults import raised_in
from spec_trainer.base.disk import cache_folder
from spec_trainer.base.stop_request import Interrupted


class Leave(SystemExit):
    """A command ends with this exit code. Any other SystemExit comes from a plugin or library, and is unforeseen."""


_FORESEEN = (SpecError, OSError, Interrupted, KeyboardInterrupt, Leave)


@contextmanager
def unforeseen_errors(logs: Path | None = None, *foreseen: type[BaseException]) -> Iterator[None]:
    """Turn an unexpected exception of the ``with`` block into a RunError.

    The traceback is written to a file in ``logs``, or else in the user's cache folder or the temporary folder.
    ``foreseen``: exceptions to pass on unchanged.
    """
    try:
        yield
    except (*_FORESEEN, *foreseen):
        raise
    except BaseException as error:  # panics of compiled libraries are no Exception
        saved = _keep("".join(traceback.format_exception(error)), logs)
        where = f"; its traceback is in {saved}" if saved else ""
        raise RunError(f"unforeseen {_name(error)}{raised_in(error, 'spec_trainer')}{where}") from error


def _name(error: BaseException) -> str:
    text = cause(error)
    return text if text.startswith(type(error).__name__) else f"{type(error).__name__}: {text}"


def _keep(text: str, logs: Path | None) -> Path | None:
    for folder in (logs, _cache(), Path(tempfile.gettempdir())):
        try:
            if folder is None:
                continue
            # Its mode is 0600, because it may have values of the run.
            descriptor, name = tempfile.mkstemp(prefix="error-", suffix=".log", dir=folder)
            with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
        except OSError:
            continue
        return Path(name)
    return None


def _cache() -> Path | None:
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: a user without a home
        return None
    return folder
