"""Errors in the log of a program."""

from spec_kit.hosting.program_log import logged_errors


def test_errors_at_the_ends_of_lines_are_found_with_their_names() -> None:
    lines = [
        "(pid=7) ERROR core.py:1510] ValueError: no room",
        "torch.OutOfMemoryError: 3 GiB",
        "an error: none",
    ]
    assert logged_errors(lines) == ["ValueError: no room", "torch.OutOfMemoryError: 3 GiB"]
