"""All ranks of vLLM take an update, or none; the routes of a server hand calls on."""

import asyncio
from dataclasses import asdict

import pytest
from tests.unit.engine_vllm.played_ranks import COUNTED, NAME, UPDATE, Ranks, call

from spec_core.errors import EngineError, ProtocolError
from spec_core.records import AcceptanceCounters
from spec_engine_vllm.acceptance_counts import EngineTotals
from spec_engine_vllm.vllm_ranks import VllmRanks

pytestmark = pytest.mark.usefixtures("counted")


def test_a_commit_asks_every_rank_first() -> None:
    llm = Ranks("received", None, "received")
    answer = call(llm, "commit", NAME)
    assert llm.calls == ["status", "commit"]
    assert (answer["ranks"], answer["status"]["state"], answer["status"]["version"]) == (2, "committed", 3)


def test_no_rank_commits_what_one_has_not_received() -> None:
    llm = Ranks("received", "aborted")
    with pytest.raises(EngineError, match="update 7 cannot be committed: rank 1 is aborted"):
        call(llm, "commit", NAME)
    assert llm.calls == ["status"]


def test_no_rank_commits_another_update_than_it_has_received() -> None:
    llm = Ranks("received")
    with pytest.raises(EngineError, match="update 8 cannot be committed: at rank 0 another update has"):
        call(llm, "commit", UPDATE.model_copy(update={"number": 8}).model_dump_json())
    assert llm.calls == ["status"]


def test_a_commit_that_one_rank_fails_is_undone_on_the_others() -> None:
    llm = Ranks("received", "received", refusing=(1,))
    with pytest.raises(EngineError, match="rank 1 cannot"):
        call(llm, "commit", NAME)
    assert llm.calls == ["status", "commit", "revert"]
    assert [status and status.state for status in llm.statuses] == ["reverted", "received"]


def test_ranks_that_differ_are_quarantined() -> None:
    assert call(Ranks("received", "idle"), "status")["status"]["state"] == "quarantined"


def test_acceptance_counts_anew_from_a_commit(counted) -> None:
    ranks = VllmRanks(Ranks("received"), EngineTotals())
    assert ranks.acceptance() == asdict(AcceptanceCounters(**COUNTED | {"accepted_per_position": (4, 2, 0)}))
    asyncio.run(ranks.call("commit", NAME))
    assert ranks.acceptance()["rounds"] == 0
    counted.update(rounds=7, accepted_per_position=[5, 3, 1])
    assert ranks.acceptance() == asdict(AcceptanceCounters(rounds=2, accepted_per_position=(1, 1, 1)))


def test_a_change_that_another_frontend_has_made_counts_anew_once_it_is_seen() -> None:
    llm = Ranks("received")
    ranks = VllmRanks(llm, EngineTotals())
    asyncio.run(VllmRanks(llm, EngineTotals()).call("commit", NAME))
    assert ranks.acceptance()["rounds"] == COUNTED["rounds"]
    asyncio.run(ranks.call("status"))
    assert ranks.acceptance()["rounds"] == 0


class Broken:
    async def collective_rpc(self, method: str, args: tuple[str, str]) -> list[None]:
        raise RuntimeError("Call to collective_rpc method failed: no attribute 'spec_draft'")


@pytest.mark.parametrize(
    ("llm", "name", "argument", "error", "message"),
    [
        (Broken(), "status", "", EngineError, "started without --worker-extension-cls spec_engine_vllm"),
        (Ranks(None), "status", "", EngineError, "serves no draft with weights"),
        (Ranks("idle"), "commit", "{}", ProtocolError, "no UpdateId"),
    ],
)
def test_what_cannot_be_done_says_why(llm, name, argument, error, message) -> None:
    with pytest.raises(error, match=message):
        call(llm, name, argument)
