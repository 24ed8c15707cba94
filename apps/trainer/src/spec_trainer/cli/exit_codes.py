"""Map the outcome of a command to its exit code, and print each failure in one line.

0: done; 1: the run failed; 2: bad usage or configuration; 130: interrupted.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable

from cyclopts.exceptions import CycloptsError

from spec_core.errors import SpecError
from spec_core.plugin_faults import raised_in
from spec_core.wording import one_line
from spec_trainer.base.stop_request import Interrupted
from spec_trainer.cli.last_resort import Leave, unforeseen_errors

_ERRORS_OF_NAMES = {errno.EACCES, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR}
"""errno values of a path from the user that is invalid or not accessible; they count as bad usage."""


def exit_code_of(command: Callable[[], None]) -> int:
    """Run a command and return its exit code; print its error, if it raises one."""
    try:
        with unforeseen_errors(None, CycloptsError):
            command()
    except CycloptsError as error:
        words = " ".join(["spec-trainer", *(error.command_chain or ()), "--help"])
        return failed(f"{error} See {words}", 2)
    except SpecError as error:
        return failed(str(error), error.exit_code)
    except OSError as error:  # a full disk, a folder that vanished: the system's message is the best one
        return failed(
            f"{error}{raised_in(error, 'spec_trainer')}", 2 if error.errno in _ERRORS_OF_NAMES else 1
        )
    except Interrupted as stopped:
        return failed(str(stopped), 130)
    except KeyboardInterrupt:
        return failed("interrupted", 130)
    except Leave as leave:
        return leave.code if isinstance(leave.code, int) else 1
    return 0


def failed(message: str, code: int) -> int:
    """Print an error message in one line, and return ``code``."""
    print(f"spec-trainer: {'' if code == 130 else 'error: '}{one_line(message)}", file=sys.stderr)
    return code
