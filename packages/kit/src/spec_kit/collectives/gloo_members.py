"""Let the members of a gloo group authenticate each other, since gloo's sockets authenticate nobody.

Gloo takes any peer for the rank that it waits for, if the peer sends the right small number. So each member
proves to the others that it knows the group's secret, before any other data is used.
"""

# torch.distributed declares no __all__, so its classes count as private names of another module.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import datetime as dt
import hmac
import secrets
from typing import Any

import torch
from torch.distributed import AllToAllOptions, ProcessGroupGloo, Store

from spec_core import foreign_errors
from spec_core.errors import PeerLost, ProtocolError

_PROOF_BYTES = 32


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
