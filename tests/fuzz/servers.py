"""Cases in which ``serving`` or ``push`` talks to a hostile server, whose answers are drawn from its address."""

import atexit
import functools
import random
import subprocess
import sys
from pathlib import Path

ENVIRONMENT = {"SPEC_DRAFT_TOKEN": "of the test"}
TIMEOUTS_S = [0.2, 0.2, 0.5, 2]
"""Seconds that a command is given for everything that it asks."""
_ADDRESSES = [
    "", " ", "x", "127.0.0.1:1", "ftp://127.0.0.1:1", "http://", "http://:1", "http://127.0.0.1:port",
    "http://127.0.0.1:0",
    "http://127.0.0.1:99999", "http://[::1", "http://[::1]:1", "http://me:secret@127.0.0.1:1",
    "http://127.0.0.1:1?x=2",
    "http://127.0.0.1:1#x", "http://127.0.0.1:1\n", "http://127.0.0.1:1/\x1b[31m", "http://a..b:1",
    "http://" + "a" * 300 + ":1",
    "http://" + "a" * 100_000, "http://b\u00fccher:1", "http://127.0.0.1:1/a b", "http://127.0.0.1:\udcff",
    "http://127.0.0.1:1\\@x",
    "http://127.0.0.1:1", "https://127.0.0.1:1", "http://nowhere.invalid:1", "http://127.0.0.1:1/" + "x" * 70_000,
]  # fmt: skip


@functools.cache
def address() -> str:
    """Return the address of the server, which the first call starts; it ends with this process."""
    server = Path(__file__).with_name("hostile_server.py")
    process = subprocess.Popen(
        [sys.executable, str(server)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    port = process.stdout.readline().strip()
    process.stdout.close()
    atexit.register(process.wait)
    atexit.register(process.stdin.close)  # before that
    return f"http://127.0.0.1:{port}"


def draw_words(root: Path, folder: Path, draw: random.Random) -> tuple[str, list[object]]:
    """Draw a command for one to three servers, some of which have no address at all."""
    urls = [_url(draw) for _ in range(draw.choice([1, 1, 1, 2, 3]))]
    what = " ".join(url[:50] for url in urls)
    limit = ["--timeout-s", draw.choice(TIMEOUTS_S)]
    as_json = ["--json"] if draw.random() < 0.2 else []
    if draw.random() < 0.7:
        return f"serving {what}", ["serving", *(f"--of={url}" for url in urls), *limit, *as_json]
    push = ["push", "--draft-model", root / "eagle3", "--target", root / "target"]
    return f"push {what}", [*push, *(f"--to={url}" for url in urls), *limit, *as_json]


def _url(draw: random.Random) -> str:
    if draw.random() < 0.1:
        return draw.choice(_ADDRESSES)
    secure = draw.random() < 0.05
    return f"{address().replace('http', 'https') if secure else address()}/{draw.randrange(10**9)}"


def reports_on_output(words: list[str], code: int, err: str) -> bool:
    """Return whether a command says what failed by a line for each server, on standard output."""
    return words[0] in ("serving", "push") and code == 1 and not err


def violations(words: list[str], out: str) -> list[str]:
    """Return what such a report broke."""
    if "--json" in words:
        return []
    lines, asked = out.splitlines(), {word for word in words if word.startswith(("--of=", "--to="))}
    found = [] if len(lines) == len(asked) else [f"{len(lines)} lines for {len(asked)} servers"]
    return found + (["a long line of a server"] if any(len(line) > 2_300 for line in lines) else [])
