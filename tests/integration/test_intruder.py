"""Another user of the host does what he can while a run trains; it ends as if nobody were there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from .launching import Lab, Run, assert_bitwise_equal, losses
from .leftovers import assert_nothing_left, belongings

if TYPE_CHECKING:
    from collections.abc import Iterator

NOBODY = 65534
STEPS = 40
MB = 1 << 20
GROWTH_BYTES = 200 * MB
"""A process of the run with the intruder beyond the same one without: he announces 4 GiB, again and again."""

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


def start(lab: Lab, name: str) -> Run:
    keys = {**lab.one_and_two, "train__steps": STEPS, "train__save_every": STEPS}
    return lab.start(lab.folder / name, **keys, engine__name="desked")


def watched(run: Run) -> Iterator[dict[str, list[object]]]:
    """What the run has and holds, some times a second, until it ends."""
    while run.process.poll() is None:
        held = belongings(run)
        names = [name.lstrip("@\0") for name in held.unix_names]
        yield {"unix": names, "tcp": [*held.ports], "pids": [p.pid for p in run.processes()]}
        time.sleep(0.1)


def largest(seen: dict[str, list[object]]) -> int:
    sizes = [0]
    for pid in seen["pids"]:
        with suppress(psutil.Error):
            sizes.append(psutil.Process(pid).memory_info().rss)
    return max(sizes)


def test_a_run_ends_as_if_no_other_user_were_there(lab: Lab) -> None:
    quiet = start(lab, "without-intruder")
    usual = max(map(largest, watched(quiet)))
    run = start(lab, "with-intruder")
    words = [sys.executable, "-I", str(Path(__file__).with_name("intruder.py")), str(NOBODY)]
    peak = 0
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as intruder:
        for seen in watched(run):
            print(json.dumps(seen), file=intruder.stdin, flush=True)
            peak = max(peak, largest(seen))
            held = belongings(run)
        told, _ = intruder.communicate()
    done = json.loads(told)
    assert (quiet.wait(60), run.wait(60)) == (0, 0), run.story()
    assert done["uid"] == NOBODY
    assert done["connected"] > 100, done
    assert done["files_opened"] == 0
    assert losses(run.output) == losses(quiet.output)
    assert_bitwise_equal(run.output, quiet.output, STEPS)
    assert peak < usual + GROWTH_BYTES
    assert "Traceback" not in run.story()
    assert_nothing_left(run, held)
