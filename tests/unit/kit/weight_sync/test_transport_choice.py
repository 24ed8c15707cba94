"""Which transport a push takes, and why others were not taken."""

import pytest

from spec_core import WeightMedium
from spec_kit.weight_sync import Publisher, ReceiverReplica, UpdateReceiver
from spec_testing.reference import reference_backend
from spec_testing.weight_stage import TARGET, ToySlot, odd_weights
from spec_weight_transports.file import FileConfig, FileTransport

from .fleet import LONG_S, file_transports


def test_transport_that_fails_at_a_rank_is_an_obstacle_and_the_rank_says_so_at_once():
    """The push, which has an hour, goes by another transport, or ends."""

    class Unplaced(FileTransport):
        def location(self, device):
            raise OSError("no such driver")

    def transports():
        return {"broken": Unplaced(FileConfig(), reference_backend()), **file_transports()}

    with (
        UpdateReceiver(ToySlot(odd_weights(0)), transports()) as receiver,
        Publisher(transports(), TARGET) as publisher,
    ):
        publisher.add("one", ReceiverReplica(receiver)).result(LONG_S)
        outcome = publisher.publish(1, odd_weights(1), timeout_s=3600).result(LONG_S).replicas["one"]
    reason = "rank 0 cannot use it: OSError: no such driver"
    assert (outcome.state, outcome.not_taken) == ("committed", {"broken": reason})


def test_obstacles_are_in_the_reason():
    class Far(FileTransport):
        def obstacle(self, place, device):
            return "the rank is on the moon"

    with (
        UpdateReceiver(ToySlot(odd_weights(0)), file_transports()) as receiver,
        Publisher(
            {"other": Far(FileConfig(), reference_backend()), "file": Far(FileConfig(), reference_backend())},
            TARGET,
        ) as publisher,
    ):
        publisher.add("one", ReceiverReplica(receiver)).result(LONG_S)
        report = publisher.publish(1, odd_weights(1)).result(LONG_S)
    assert report.replicas["one"].reason == (
        "no weight transport reaches replica 'one' "
        "(other: rank 0 does not have it; file: the rank is on the moon)"
    )


@pytest.mark.parametrize(
    ("fastest_first", "taken", "not_taken"),
    [
        (False, "files", {"far": "the rank is on the moon", "wire": "named later", "shy": "named later"}),
        (
            True,
            "wire",
            {
                "far": "the rank is on the moon",
                "files": "files, slower than device link",
                "shy": "unstated, slower than device link",
            },
        ),
    ],
)
def test_the_first_transport_or_the_fastest_is_taken_and_the_others_say_why_not(
    fastest_first, taken, not_taken
):
    class Stating(FileTransport):
        def __init__(self, medium, obstacle=""):
            super().__init__(FileConfig(), reference_backend())
            self.stated, self.obstructing = medium, obstacle

        def medium(self, place, device):
            return self.stated

        def obstacle(self, place, device):
            return self.obstructing

    def transports():
        return {
            "far": Stating(WeightMedium.DEVICE_MEMORY, "the rank is on the moon"),
            "files": Stating(WeightMedium.FILES),
            "wire": Stating(WeightMedium.DEVICE_LINK),
            "shy": Stating(WeightMedium.UNSTATED),
        }

    with (
        UpdateReceiver(ToySlot(odd_weights(0)), transports()) as receiver,
        Publisher(transports(), TARGET, fastest_first=fastest_first) as publisher,
    ):
        publisher.add("one", ReceiverReplica(receiver)).result(LONG_S)
        outcome = publisher.publish(1, odd_weights(1)).result(LONG_S).replicas["one"]
    assert (outcome.state, outcome.transport, outcome.not_taken) == ("committed", taken, not_taken)
