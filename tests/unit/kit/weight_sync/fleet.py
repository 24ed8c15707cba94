"""Replicas of one process under one publisher."""

from spec_kit.weight_sync import Publisher, ReceiverReplica, UpdateReceiver
from spec_testing.reference import reference_backend
from spec_testing.weight_stage import TARGET, ToySlot, odd_weights
from spec_weight_transports.file import FileConfig, FileTransport

LONG_S, SHORT_S = 60, 0.5


def file_transports(**options):
    return {"file": FileTransport(FileConfig(**options), reference_backend())}


class Fleet:
    """Replicas of this process under one publisher."""

    def __init__(self, stack, size, **options):
        self.slots = [ToySlot(odd_weights(0)) for _ in range(size)]
        self.receivers = [stack.enter_context(UpdateReceiver(slot, file_transports())) for slot in self.slots]
        self.publisher = stack.enter_context(Publisher(file_transports(), TARGET, **options))
        for index, receiver in enumerate(self.receivers):
            self.publisher.add(str(index), ReceiverReplica(receiver)).result(LONG_S)

    def publish(self, version, **options):
        return self.publisher.publish(version, odd_weights(version), **options).result(LONG_S)

    def versions(self):
        return [receiver.status().version for receiver in self.receivers]

    def settle(self):
        """Return when what follows a push, such as a repair, is over."""
        self.publisher.remove("nobody").result(LONG_S)


def break_once(slot, monkeypatch, method):
    """Let the next call of a slot's method raise."""
    real, failures = getattr(slot, method), [RuntimeError("planted")]

    def call(*args):
        if failures:
            raise failures.pop()
        return real(*args)

    monkeypatch.setattr(slot, method, call)
