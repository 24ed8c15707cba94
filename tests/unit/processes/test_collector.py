import gc
import subprocess
import sys

import pytest

from spec_processes import collect_rarely

ENDS_WITH_A_CYCLE = """
from spec_processes import collect_rarely
{call}
class Noticed:
    def __del__(self):
        print("walked through")
cycle = [Noticed()]
cycle.append(cycle)
"""


@pytest.fixture(autouse=True)
def thresholds():
    """Give back this process's own thresholds."""
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def walks_while_making(objects: int) -> int:
    """How often the collector walks through the youngest objects while ``objects`` lists that stay are made."""
    walks = gc.get_stats()[0]["collections"]
    kept = [[] for _ in range(objects)]
    assert len(kept) == objects
    return gc.get_stats()[0]["collections"] - walks


def test_the_collector_runs_less_often_and_still_runs():
    gc.set_threshold(700, 10, 10)
    usual = walks_while_making(200_000)
    collect_rarely()
    assert 0 < walks_while_making(200_000) < usual / 10


@pytest.mark.parametrize("call", ["", "collect_rarely()"])
def test_the_collector_walks_through_nothing_at_the_end_of_a_process(call):
    program = ENDS_WITH_A_CYCLE.format(call=call)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout == ("" if call else "walked through\n")
