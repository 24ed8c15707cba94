"""A process without the group's secret is no member."""

import datetime as dt

import pytest
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo

from spec_core.errors import PeerLost, ProtocolError
from spec_kit.collectives.gloo_members import prove_default_group, prove_membership
from spec_testing.processes import Rank, run_ranks

LIMIT_S = 20.0


def prove(me: Rank, folder: str, deceived: int | None) -> str:
    """``deceived``: a rank that finds another secret in its store, as a stranger in its place would have to guess."""
    store = dist.FileStore(f"{folder}/store")
    gloo = ProcessGroupGloo(store, me.rank, me.world_size, dt.timedelta(seconds=LIMIT_S))
    own = dist.HashStore()
    own.set("secret", "guess")
    try:
        prove_membership(gloo, own if me.rank == deceived else store, LIMIT_S)
    except ProtocolError as error:
        return str(error)
    return ""


def test_members_know_the_secret_and_others_are_found_out(tmp_path):
    (tmp_path / "right").mkdir()
    assert run_ranks(prove, 3, str(tmp_path / "right"), None) == ["", "", ""]
    problem = "who took the place of rank {} does not know the group's secret; run it again"
    (tmp_path / "wrong").mkdir()
    assert run_ranks(prove, 3, str(tmp_path / "wrong"), 2) == [*[problem.format(2)] * 2, problem.format(0)]


def prove_default_by_a_guess(me: Rank, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store")
    dist.init_process_group("gloo", store=store, rank=me.rank, world_size=me.world_size)
    own = dist.HashStore()
    own.set("secret", "guess")
    with pytest.raises(ProtocolError, match="does not know the group's secret"):
        prove_default_group(own if me.rank else store, LIMIT_S)


def test_a_wrong_proof_in_the_default_group_is_named(tmp_path):
    run_ranks(prove_default_by_a_guess, 2, str(tmp_path))


def prove_default(me: Rank, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store")
    dist.init_process_group("gloo", store=store, rank=me.rank, world_size=me.world_size)
    for _ in range(5):
        prove_default_group(store, LIMIT_S)
    dist.destroy_process_group()


def prove_to_one_who_leaves(me: Rank, folder: str) -> str:
    store = dist.FileStore(f"{folder}/store")
    dist.init_process_group("gloo", store=store, rank=me.rank, world_size=me.world_size)
    if me.rank == 1:
        return ""
    try:
        prove_default_group(store, LIMIT_S)
    except PeerLost as error:
        return str(error)
    return "believed"


def test_a_proof_that_does_not_come_is_named(tmp_path):
    told, _ = run_ranks(prove_to_one_who_leaves, 2, str(tmp_path))
    assert "a rank has not proved its membership" in told
    assert "run it again" in told
    assert "\n" not in told


def test_a_backend_of_several_types_of_device_is_asked_as_one(tmp_path):
    """Again and again: nobody draws a secret anew while another still reads it."""
    run_ranks(prove_default, 2, str(tmp_path))
