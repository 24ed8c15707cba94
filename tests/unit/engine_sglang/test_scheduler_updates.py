"""Requests that began before the draft has changed do not count, and leave no prefix to those after a revert."""

import sys
import time
from types import ModuleType, SimpleNamespace

import pytest

from spec_core import UpdateId
from spec_engine_sglang import scheduler_updates
from spec_engine_sglang.scheduler_updates import chosen, count_verification, keep_prefixes_apart

UPDATE = UpdateId(group="default", fence=1, number=7)


@pytest.fixture
def requests(monkeypatch):
    requests = scheduler_updates._Requests()
    monkeypatch.setattr(scheduler_updates, "_requests", requests)
    return requests


def scheduled():
    """Return a request that SGLang's scheduler has taken up now."""
    return SimpleNamespace(time_stats=SimpleNamespace(forward_entry_time=time.perf_counter()))


def counted(requests):
    counted = requests.counts.counted(3)
    return counted.rounds, counted.accepted, counted.answers


def test_verifications_of_requests_from_before_do_not_count(requests):
    running = scheduled()
    count_verification(None, running, 2)
    assert counted(requests) == (1, 2, 1)
    requests.begin(None)
    begun = scheduled()
    for _ in range(80):
        count_verification(None, running, 0)
    count_verification(None, begun, 3)
    assert counted(requests) == (1, 3, 1)
    count_verification(None, begun, 1)
    assert counted(requests) == (2, 4, 1)


@pytest.mark.parametrize("own", [None, "tenant"])
def test_prefixes_are_kept_apart_from_a_revert_on(requests, own):
    def key():
        request = SimpleNamespace(extra_key=own)
        keep_prefixes_apart(None, request)
        return request.extra_key

    requests.begin(None)
    assert key() == own
    requests.begin(UPDATE)
    reverted = key()
    assert reverted == (own or "") + "draft-1-7"
    requests.begin(None)
    assert key() == reverted
    requests.begin(UPDATE.model_copy(update={"number": 9}))
    assert key() not in (own, reverted)


def test_arguments_are_those_that_sglang_has_chosen(monkeypatch):
    given = SimpleNamespace(speculative_num_draft_tokens=None)
    assert chosen(given) is given  # 0.5.16 writes its choices into the arguments
    view = SimpleNamespace(speculative_num_draft_tokens=8)
    base = SimpleNamespace(resolved_view=lambda arguments: view if arguments is given else None)
    for name in ("sglang", "sglang.srt", "sglang.srt.arg_groups"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.arg_groups.model_override_base", base)
    assert chosen(given) is view
