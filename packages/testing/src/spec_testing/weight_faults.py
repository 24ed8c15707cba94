"""This module has WeightTransportSuite's test functions with failing processes or damaged tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from spec_core import Manifest, WeightReceiver, WeightSender, WeightTransport
from spec_testing.processes import Rank
from spec_testing.weight_stage import (
    BUCKET_BYTES,
    FENCE,
    WAIT_S,
    RemoteReplica,
    StagedReceiver,
    WeightStage,
    odd_weights,
    raw_bytes,
    replica_of_other_rank,
    serve_receiver,
)

Weights = Iterator[tuple[str, Tensor]]

PUSH_S = 3.0
"""Deadline, in seconds, of a push that times out because of a fault."""


def fault_in_replica(me: Rank, stage: WeightStage, push_s: float) -> None:
    """Publish updates from rank 0 to the other ranks, with a fault in rank 1 in the second update.

    Rank 3 is added after the fault. ``push_s``: deadline of the second update in seconds. The update ends
    only at this deadline if the fault stops rank 1.
    """
    if me.rank > 0:
        receiver = StagedReceiver(stage, stage.build(), me.reach)
        serve_receiver(me, receiver)
        assert receiver.serves(4)
        return
    replicas = {rank: RemoteReplica(address) for rank, address in (me.receive() for _ in range(3))}
    with stage.publisher() as publisher:
        for rank in (1, 2):
            publisher.add(f"replica {rank}", replicas[rank]).result(WAIT_S)
        assert publisher.publish(1, stage.weights(1)).result(WAIT_S).committed
        report = publisher.publish(2, stage.weights(2), timeout_s=push_s).result(WAIT_S)
        assert report.replicas["replica 1"].reason
        _check_serves(replicas[2], 2)
        # The fault of rank 1 does not affect the other ranks: they commit the next update.
        report = publisher.publish(3, stage.weights(3)).result(WAIT_S)
        assert report.committed, report
        assert report.replicas["replica 1"].state == "quarantined"
        _check_serves(replicas[2], 3)
        publisher.remove("replica 1").result(WAIT_S)
        caught_up = publisher.add("late", replicas[3]).result(WAIT_S)
        assert caught_up is not None
        assert caught_up.state == "committed", caught_up
        _check_serves(replicas[3], 3)
        assert publisher.publish(4, stage.weights(4)).result(WAIT_S).committed
    for rank in (2, 3):
        replicas[rank].end()


def fault_in_publisher(me: Rank, stage: WeightStage) -> None:
    """Publish from rank 0, which fails in its second update, then from rank 1. Rank 2 is the replica."""
    if me.rank == 2:
        receiver = StagedReceiver(stage, stage.build(), lambda point: None)
        serve_receiver(me, receiver, num_clients=2)
        assert receiver.serves(5)
        return
    if me.rank == 0:
        _publish_until_killed(me, stage)
        return
    with replica_of_other_rank(me) as replica:
        deadline = time.monotonic() + WAIT_S
        while replica.status().result(WAIT_S).state != "aborted" and time.monotonic() < deadline:
            time.sleep(0.05)
        _check_serves(replica, 1, state="aborted")
        with stage.publisher(FENCE + 1) as publisher:
            publisher.add("replica", replica).result(WAIT_S)
            report = publisher.publish(5, stage.weights(5)).result(WAIT_S)
            assert report.committed, report


def _publish_until_killed(me: Rank, stage: WeightStage) -> None:
    calls: list[str] = []

    def before(call: str) -> None:
        calls.append(call)
        me.reach(f"{call} {calls.count(call)}")

    address = me.receive()[1]
    with stage.publisher() as publisher:
        publisher.add("replica", RemoteReplica(address, before)).result(WAIT_S)
        publisher.publish(1, stage.weights(1)).result(WAIT_S)
        publisher.publish(2, _Reached(stage.weights(2), lambda: me.reach("send 2"))).result(WAIT_S)
    raise AssertionError("the publisher has outlived its fault")


class _Reached(dict[str, "Tensor"]):
    """Weights that call ``reach`` when they are read for the second time.

    They are read for the first time when the manifest is made.
    """

    def __init__(self, weights: Mapping[str, Tensor], reach: Callable[[], None]) -> None:
        super().__init__(weights)
        self._reach = reach
        self._described = False

    def __getitem__(self, name: str) -> Tensor:
        if name == "cut":
            self._reach()
        return super().__getitem__(name)

    def items(self) -> Any:
        if self._described:
            self._reach()
        self._described = True
        return super().items()


def _check_serves(replica: RemoteReplica, version: int, state: str = "") -> None:
    status = replica.status().result(WAIT_S)
    assert status.version == version, status
    assert not state or status.state == state, status


def _flip(weights: Weights) -> Weights:
    for name, tensor in weights:
        raw = raw_bytes(tensor).clone()
        if name == "cut":
            raw[-1] ^= 1
        yield name, raw.view(tensor.dtype).view(tensor.shape)


def _drop(weights: Weights) -> Weights:
    return ((name, tensor) for name, tensor in weights if name != "odd")


def _double(weights: Weights) -> Weights:
    for name, tensor in weights:
        yield name, tensor
        if name == "left":
            yield name, tensor


def _truncate(weights: Weights) -> Weights:
    for name, tensor in weights:
        yield name, tensor[:-1] if name == "exact" else tensor


def _swap(weights: Weights) -> Weights:
    """Exchange two tensors of equal shape and dtype."""
    other = {"left": "right", "right": "left"}
    return ((other.get(name, name), tensor) for name, tensor in weights)


def _reorder(weights: Weights) -> Weights:
    """Exchange two buckets of one tensor."""
    for name, tensor in weights:
        if name == "cut":
            first, second, rest = tensor.split([BUCKET_BYTES, BUCKET_BYTES, len(tensor) - 2 * BUCKET_BYTES])
            yield name, torch.cat([second, first, rest])
        else:
            yield name, tensor


def _stale(weights: Weights) -> Weights:
    """Yield one tensor of the previous version, and the others unchanged."""
    before = odd_weights(0)
    return ((name, before[name] if name == "scalar" else tensor) for name, tensor in weights)


DAMAGES = (_flip, _drop, _double, _truncate, _swap, _reorder, _stale)


class _DamagingReceiver(WeightReceiver):
    def __init__(self, receiver: WeightReceiver, damage: Callable[[Weights], Weights]) -> None:
        self._receiver = receiver
        self._damage = damage
        self.address = receiver.address

    def receive(self, sender: str, deadline: float) -> Weights:
        return self._damage(self._receiver.receive(sender, deadline))

    def close(self) -> None:
        self._receiver.close()


class _DamagingTransport(WeightTransport):
    """The transport under test, but it damages the tensors of odd versions, each version differently."""

    def __init__(self, transport: WeightTransport) -> None:
        super().__init__(transport.config, transport.backend)
        self._transport = transport

    def location(self, device: torch.device) -> str:
        return self._transport.location(device)

    def obstacle(self, location: str, device: torch.device) -> str:
        return self._transport.obstacle(location, device)

    def receiver(self, manifest: Manifest, device: torch.device, bucket_bytes: int) -> WeightReceiver:
        receiver = self._transport.receiver(manifest, device, bucket_bytes)
        if manifest.version % 2 == 0:
            return receiver
        return _DamagingReceiver(receiver, DAMAGES[manifest.version // 2])

    def sender(
        self,
        manifest: Manifest,
        weights: Mapping[str, Tensor],
        receivers: Sequence[str],
        device: torch.device,
        replica: str,
    ) -> WeightSender:
        return self._transport.sender(manifest, weights, receivers, device, replica)

    def close(self) -> None:
        self._transport.close()


def publish_damaged(me: Rank, stage: WeightStage) -> None:
    """Publish damaged updates to rank 1, each in another way, and an undamaged update after each."""
    if me.rank == 1:
        transport = _DamagingTransport(stage.build())
        serve_receiver(me, StagedReceiver(stage, transport, lambda point: None))
        return
    with replica_of_other_rank(me) as replica, stage.publisher() as publisher:
        publisher.add("replica", replica).result(WAIT_S)
        for version, damage in zip(range(1, 2 * len(DAMAGES), 2), DAMAGES, strict=True):
            report = publisher.publish(version, stage.weights(version)).result(WAIT_S)
            assert not report.committed, damage
            assert replica.ask("serves", version - 1), damage
            assert replica.status().result(WAIT_S).state == "aborted"
            report = publisher.publish(version + 1, stage.weights(version + 1)).result(WAIT_S)
            assert report.committed, (damage, report)
            assert replica.ask("serves", version + 1)
