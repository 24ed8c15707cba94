"""A port for a server that listens only after it has started, for a minute say."""

import contextlib
import random
import socket


def free_port() -> int:
    """Return a port of this host below those that the kernel gives to others meanwhile."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no port is free")
