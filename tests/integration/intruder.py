"""Another user of the host, who troubles every socket of a run: ``python intruder.py USER``, started by root.

Takes that user's identity first. Each line of JSON on standard input says what the run has at that time: ``unix``
names, ``tcp`` ports, ``pids``; each is answered by an empty line. When the input ends, a line of JSON says what came
of it all.
"""

import contextlib
import itertools
import json
import os
import socket
import struct
import sys

HUGE = 1 << 32
SAYINGS = [
    # The first one is heard first: where it ends a thread, nobody hears the rest.
    *(
        struct.pack(order, len(said)) + said
        for said in (b'{"token":"\\ud800"}', b"[" * 4000)
        for order in ("!I", "<I")
    ),
    b"",
    struct.pack("!I", HUGE - 1) + b"x" * 65536,
    struct.pack("<I", HUGE - 1) + b"x" * 65536,
    struct.pack("<Q", 0),
    struct.pack("<Q", 1),
    b"GET / HTTP/1.1\r\n\r\n",
]
KEPT = 200
"""Connections that are held open; over each goes a byte for every line of input."""


def main() -> None:
    user = int(sys.argv[1])
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    told = {"uid": os.getuid(), "connected": 0, "answered_bytes": 0, "files_opened": 0}
    ends: list[socket.socket] = []
    for line in sys.stdin:
        seen = json.loads(line)
        targets = [(socket.AF_UNIX, f"\0{name}") for name in seen["unix"]]
        targets += [(socket.AF_INET, ("127.0.0.1", port)) for port in seen["tcp"]]
        for saying, (family, address) in itertools.product(SAYINGS, targets):
            if (end := knock(family, address, saying)) is not None:
                ends.append(end)
                told["connected"] += 1
        told["answered_bytes"] += sum(drip(end) for end in ends)
        told["files_opened"] += sum(map(files_opened, seen["pids"]))
        while len(ends) > KEPT:
            ends.pop(0).close()
        print(flush=True)  # for this line he has done what he could
    print(json.dumps(told))


def knock(family: int, address: object, saying: bytes) -> socket.socket | None:
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET)[: 2 if family == socket.AF_UNIX else 1]:
        end = socket.socket(family, kind)
        end.settimeout(0.05)
        try:
            end.connect(address)
        except OSError:
            end.close()
            continue
        end.setblocking(False)
        with contextlib.suppress(OSError):
            end.send(saying)
        return end
    return None


def drip(end: socket.socket) -> int:
    """Says one more byte; bytes that were answered."""
    with contextlib.suppress(OSError):
        end.send(b"\0", socket.MSG_NOSIGNAL)
    with contextlib.suppress(OSError):
        return len(end.recv(65536))
    return 0


def files_opened(pid: int) -> int:
    """How many of a process's files he can open for writing, the ranks' store and its memory among them."""
    opened = 0
    with contextlib.suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/fd/{descriptor}", "r+b"):
                opened += 1
    return opened


if __name__ == "__main__":
    main()
