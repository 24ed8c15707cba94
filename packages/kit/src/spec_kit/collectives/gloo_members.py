"""Authentication of the members of a gloo group: gloo's sockets authenticate nobody, so the members do it.

Gloo listens on TCP as long as its group exists. It accepts any peer that sends the right small number as the rank
that it waits for. It keeps every other connection open, and ends the process when the process has no free file
descriptor. So gloo's ports are closed to new connections after the members have connected. Then each member
proves to the others that it knows the group's secret, before any other data is used.
"""

# torch.distributed declares no __all__, so its classes count as private names of another module.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
import ctypes
import datetime as dt
import hmac
import os
import secrets
import socket
import struct
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import AllToAllOptions, ProcessGroupGloo

from spec_core.errors import PeerLost, ProtocolError
from spec_core.foreign import foreign_errors
from spec_processes.sockets.addresses import opening

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch.distributed import Store

_SO_ATTACH_FILTER = 26  # asm-generic/socket.h
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
"""linux/filter.h: BPF_RET of 0 bytes."""
_PROOF_BYTES = 32


@contextlib.contextmanager
def closed_afterwards() -> Generator[None]:
    """Close TCP ports that this process opens in the ``with`` block to new connections when the block ends.

    Existing connections stay open.
    """
    before = _listeners()
    yield
    for inode, descriptor in _listeners().items():
        if inode not in before:
            _drop_all(descriptor)


@contextlib.contextmanager
def gloo_device(interface: str) -> Generator[Any]:
    """Yield a gloo device at the address ``interface``; close its port to new connections when the block ends.

    Existing connections stay open. Other threads may call this function at the same time, or
    ``spec_processes.sockets.bind``. A socket that another thread opens otherwise may be taken for the device's.
    """
    with opening:
        before = _listeners()
        # Connected when a group is built, so that one that cannot work raises there (P8).
        device = ProcessGroupGloo.create_device(hostname=interface, lazy_init=False)
        ports = [descriptor for inode, descriptor in _listeners().items() if inode not in before]
    yield device
    for descriptor in ports:
        _drop_all(descriptor)


def prove_membership(gloo: Any, store: Store, timeout_s: float) -> None:
    """Prove to every other member that this process knows the secret in ``store``; collective.

    Raises ProtocolError if another member's proof is wrong, and gloo's RuntimeError if it does not arrive in time.
    """
    rank, world_size = gloo.rank(), gloo.size()
    if world_size == 1:
        return
    if rank == 0 and not store.check(["secret"]):
        store.set("secret", secrets.token_hex(_PROOF_BYTES))
    secret = store.get("secret")
    proofs = b"".join(_proof(secret, rank, peer) for peer in range(world_size))
    mine = torch.frombuffer(bytearray(proofs), dtype=torch.uint8)
    theirs = torch.empty_like(mine)
    gloo.alltoall_base(theirs, mine, [], [], AllToAllOptions()).wait(dt.timedelta(seconds=timeout_s))
    for peer, proof in enumerate(theirs.view(world_size, -1)):
        if not hmac.compare_digest(bytes(proof.tolist()), _proof(secret, peer, rank)):
            raise ProtocolError(
                f"who took the place of rank {peer} does not know the group's secret; run it again"
            )


def prove_default_group(store: Store, timeout_s: float) -> None:
    """Run ``prove_membership`` for each gloo backend of torch's default group.

    Raises PeerLost if a rank's proof does not arrive, and ProtocolError if it is wrong.
    """
    group = torch.distributed.group.WORLD
    assert group is not None
    # One backend may serve several types of device.
    for backend in dict.fromkeys(map(group._get_backend, sorted(group._device_types, key=str))):
        if isinstance(backend, ProcessGroupGloo):
            with foreign_errors(
                PeerLost,
                "a rank has not proved its membership: it has ended, or another user took its place while ranks "
                "connected; run it again",
            ):
                prove_membership(backend, store, timeout_s)


def _proof(secret: bytes, speaker: int, listener: int) -> bytes:
    return hmac.digest(secret, f"{speaker} to {listener}".encode(), "sha256")


def _listeners() -> dict[str, int]:
    """Return the TCP sockets on which this process listens: inode -> file descriptor."""
    found: dict[str, int] = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of this very listing, for one
            inode = os.readlink(f"/proc/self/fd/{name}")
            if inode.startswith("socket:") and _listens(int(name)):
                found[inode] = int(name)
    return found


def _listens(descriptor: int) -> bool:
    with socket.socket(fileno=os.dup(descriptor)) as end:
        on_ip = end.family in (socket.AF_INET, socket.AF_INET6)
        return on_ip and bool(end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _drop_all(descriptor: int) -> None:
    """Let the kernel drop all packets that arrive at a listening socket.

    If the socket were closed or shut down, gloo's thread would end the process.
    """
    program = ctypes.create_string_buffer(_DROP_ALL)
    with socket.socket(fileno=os.dup(descriptor)) as end:
        end.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))
