"""One status for all ranks of a replica."""

from spec_core import ServingStatus, UpdateId
from spec_kit.weight_sync.receiver_replica import combined


def update(number, *, fence=5, group="default"):
    return UpdateId(group=group, fence=fence, number=number)


def test_status_of_ranks_that_differ_is_quarantined():
    one = ServingStatus(state="committed", version=3, digest="d", update=update(1))
    assert combined([one, one]) == one
    both = combined([one, one.model_copy(update={"version": 2})])
    assert both.state == "quarantined"
    assert both.reason == "its ranks differ (rank 0: committed, version 3, rank 1: committed, version 2)"


def test_status_of_ranks_names_the_latest_update_of_any():
    one = ServingStatus(state="idle", newest=2)
    other = one.model_copy(update={"update": update(1, fence=9), "newest": 4})
    last = one.model_copy(update={"update": update(7)})
    both = combined([one, other, last])
    assert (both.update, both.newest) == (update(1, fence=9), 4)
