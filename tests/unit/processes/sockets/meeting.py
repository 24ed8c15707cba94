"""A rendezvous of the ranks of a test."""

from spec_processes.sockets.rendezvous import TcpRendezvous
from spec_testing.processes import Rank

TOKEN, LONG_S, SHORT_S = "a secret of the run", 15.0, 0.5


def meet(me: Rank, address: str = "127.0.0.1:0", timeout_s: float = LONG_S) -> TcpRendezvous:
    where = address if me.rank == 0 else me.receive()
    rendezvous = TcpRendezvous(where, me.rank, me.world_size, TOKEN, timeout_s)
    if me.rank == 0:
        me.publish(rendezvous.address)
    return rendezvous.join(LONG_S)
