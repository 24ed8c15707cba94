"""Features over HCCL arrive while a further sender connects."""

import threading
import time

from cards import free_card

from spec_backend_ascend.backend import AscendBackend
from spec_backend_ascend.hccl_pool import HcclPoolFactory
from spec_testing.processes import run_ranks
from spec_testing.transport_stage import LONG_S, SCHEMA, Stage, take


def build():
    backend = AscendBackend(AscendBackend.Config(name="ascend"))
    backend.device(free_card())
    return backend.transport("disaggregated")


SLOW_S = 0.2


def receive_beside_a_newcomer(me, stage):
    """A sample is received when another sender's communicator is under way: HCCL takes one call at a time."""
    if me.rank == 0:
        with stage.receiver(me) as receiver:
            assert me.receive() == "announced"
            admitted, admit = threading.Event(), HcclPoolFactory.admit

            def admit_slowly(factory, *words):
                pool = admit(factory, *words)
                admitted.set()
                time.sleep(SLOW_S)
                return pool

            HcclPoolFactory.admit = admit_slowly
            me.publish("connect")
            assert admitted.wait(LONG_S)
            take(stage, receiver, 1)
            take(stage, receiver, 2)
            me.publish("received")
        return
    address = me.receive()
    if me.rank == 2:
        assert [me.receive(), me.receive()] == ["announced", "connect"]
    with stage.build().connect(address, SCHEMA, LONG_S) as sender:
        sender.send(stage.sample(me.rank), LONG_S)
        if me.rank == 1:
            me.publish("announced")
            assert me.receive() == "connect"
        assert me.receive() == "received"


def test_a_sample_is_received_while_another_sender_connects():
    run_ranks(receive_beside_a_newcomer, 3, Stage(build, "npu"))
