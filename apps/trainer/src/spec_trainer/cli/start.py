"""Start ``spec-trainer``. The command line is imported late, so that Ctrl-C meanwhile ends in one line, too."""

from __future__ import annotations

import sys

from spec_trainer.cli.interrupts import interrupt_once_torch_is_loaded


def main() -> None:
    """Import and run the command line; exit with its code."""
    interrupt_once_torch_is_loaded()
    try:
        from spec_trainer.cli.app import main as run_command_line
    except KeyboardInterrupt:
        _end("interrupted", 130)
    except (MemoryError, OSError, ImportError) as error:  # such as under a small ulimit -v or -n
        _end(
            f"error: the program cannot be loaded: {type(error).__name__}: {' '.join(str(error).split())[:500]}",
            1,
        )
    try:
        run_command_line()
    except KeyboardInterrupt:  # before the command begins
        _end("interrupted", 130)


def _end(message: str, code: int) -> None:
    print(f"spec-trainer: {message}", file=sys.stderr)
    sys.exit(code)
