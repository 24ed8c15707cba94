"""A sender and the ranks of a replica keep their group while every end comes through its updates (W7)."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from spec_backend_cpu.backend import CpuBackend
from spec_core import Manifest, WeightTransportConfig
from spec_core.errors import PeerLost, ProtocolError
from spec_kit.weight_sync.digest import tensor_entry
from spec_testing.resources import check_released, settled_resources
from spec_testing.weight_stage import BUCKET_BYTES, odd_weights, same_bytes
from spec_weight_transports.collective import CollectiveTransport

CPU = torch.device("cpu")
LONG_S = 20.0


class Noting(CpuBackend):
    """The CPU, which notes its process groups."""

    def process_group(self, rendezvous, device):
        group = super().process_group(rendezvous, device)
        self.groups.append(group)
        return group


class Ends:
    """A sender and two ranks of a replica, in threads of this process."""

    def __init__(self):
        self.groups = []
        self.sender = self.new_transport()
        self.ranks = [self.new_transport(), self.new_transport()]
        self.version = 0

    def new_transport(self):
        backend = Noting(Noting.Config())
        backend.groups = self.groups
        return CollectiveTransport(WeightTransportConfig(bucket_bytes=BUCKET_BYTES), backend)

    @property
    def num_groups(self):
        """Groups that were built, each once at every end."""
        return sum(group.rank == 0 for group in self.groups)

    def update(self, *, seconds=LONG_S, group="g", replica="one", take=None):
        """Send a version; each rank checks what arrives, or closes after ``take`` tensors."""
        self.version += 1
        weights = odd_weights(self.version)
        entries = tuple(tensor_entry(name, tensor) for name, tensor in weights.items())
        manifest = Manifest(group=group, version=self.version, fence=1, target="t", tensors=entries)
        deadline = time.monotonic() + seconds
        receivers = [rank.receiver(manifest, CPU, BUCKET_BYTES) for rank in self.ranks]
        addresses = [receiver.address for receiver in receivers]
        with (
            self.sender.sender(manifest, weights, addresses, CPU, replica) as sender,
            ThreadPoolExecutor(len(receivers)) as pool,
        ):
            answers = sender.open(deadline)
            arrivals = [
                pool.submit(arrived, receiver, answer, deadline, take)
                for receiver, answer in zip(receivers, answers, strict=True)
            ]
            sender.send(deadline)
            for arrival in arrivals:
                found = arrival.result()
                assert all(same_bytes(found[name], tensor) for name, tensor in weights.items())

    def close(self):
        for transport in (self.sender, *self.ranks):
            transport.close()


def arrived(receiver, sender, deadline, take):
    found = {}
    with receiver:
        for name, tensor in receiver.receive(sender, deadline):
            if len(found) == take:
                raise PeerLost("planted")
            found[name] = tensor.clone()
    return found


@pytest.fixture
def ends():
    ends = Ends()
    yield ends
    ends.close()
    for group in ends.groups:
        with pytest.raises(PeerLost, match="cannot be used any more"):
            group.barrier()


def test_updates_go_on_with_one_group(ends):
    for _ in range(3):
        ends.update()
    assert ends.num_groups == 1


def test_each_update_group_and_each_replica_has_its_own(ends):
    for _ in range(2):
        ends.update(group="a")
        ends.update(group="b")
    assert ends.num_groups == 2


def start_a_rank_anew(ends):
    ends.ranks[1].close()
    ends.ranks[1] = ends.new_transport()


def start_the_sender_anew(ends):
    ends.sender.close()
    ends.sender = ends.new_transport()


def exchange_ranks(ends):
    ends.ranks.reverse()


def take_a_rank_away(ends):
    ends.ranks.pop().close()


def add_a_rank(ends):
    ends.ranks.append(ends.new_transport())


def close_all(ends):
    ends.close()


def forget_the_replica(ends):
    ends.sender.forget("one")


@pytest.mark.parametrize(
    "change",
    [
        start_a_rank_anew,
        start_the_sender_anew,
        exchange_ranks,
        take_a_rank_away,
        add_a_rank,
        close_all,
        forget_the_replica,
    ],
)
def test_other_ends_build_a_group_anew_in_the_same_update(ends, change):
    ends.update()
    change(ends)
    ends.update()
    ends.update()
    assert ends.num_groups == 2


def test_group_whose_calls_would_give_up_too_early_is_built_anew(ends):
    ends.update(seconds=LONG_S)
    ends.update(seconds=1.5 * LONG_S)
    assert ends.num_groups == 1
    ends.update(seconds=3 * LONG_S)
    assert ends.num_groups == 2


def test_group_of_a_broken_update_is_used_no_more(ends):
    ends.update()
    with pytest.raises(PeerLost):
        ends.update(take=1)
    ends.update()
    ends.update()
    assert ends.num_groups == 2


def test_nothing_is_sent_before_it_is_agreed_on_what_group(ends):
    ends.update()
    weights = odd_weights(2)
    entries = tuple(tensor_entry(name, tensor) for name, tensor in weights.items())
    manifest = Manifest(group="g", version=2, fence=1, target="t", tensors=entries)
    with (
        ends.sender.sender(manifest, weights, ["", ""], CPU, "one") as sender,
        pytest.raises(ProtocolError, match="open"),
    ):
        sender.send(time.monotonic() + LONG_S)


def test_close_releases_what_was_kept(ends):
    ends.update()
    ends.close()
    before = settled_resources()
    ends.update()
    assert settled_resources().descriptors > before.descriptors
    ends.close()
    check_released(before)
