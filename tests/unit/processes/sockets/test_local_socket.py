"""Who may be at the other end of a Unix socket of ours."""

import os
import select
import subprocess
import sys
import threading
import time

import pytest

from spec_core.errors import DeadlineExceeded
from spec_kit.streams.shared_memory_transport import SharedMemoryTransport
from spec_processes.sockets import local_socket
from spec_testing.transport_stage import SCHEMA

NOBODY = 65534
LIMIT_S = 20.0
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")

_AS_NOBODY = f"import os, socket, sys, time; os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"


def another_user(script: str, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-I", "-c", _AS_NOBODY + script, *words]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@as_root
def test_another_user_is_refused_before_a_byte_is_read_and_named_once(caplog):
    script = """
for _ in range(50):
    with socket.socket(socket.AF_UNIX) as end:
        end.connect("\\0" + sys.argv[1])
        end.settimeout(20)
        try:
            assert end.recv(1) == b""
        except ConnectionError:
            pass
"""
    local_socket._warn_of.cache_clear()
    listener, name = local_socket.listen("spec-test")
    with listener, another_user(script, name) as stranger:
        for _ in range(50):
            assert local_socket.accept(listener) is None
        assert stranger.wait(LIMIT_S) == 0
        with local_socket.connect(name, LIMIT_S) as own:
            accepted = local_socket.accept(listener)
            assert accepted is not None
            with accepted:
                assert local_socket.peer(accepted) == local_socket.peer(own) == (os.getpid(), os.geteuid())
    assert caplog.text.count(f"user {NOBODY}") == 1


@as_root
def test_a_name_that_another_user_has_taken_is_told_nothing():
    script = """
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind("\\0" + sys.argv[1])
    listener.listen()
    print(flush=True)
    end, _ = listener.accept()
    print(len(end.recv(100)), flush=True)
"""
    with another_user(script, f"spec-taken-{os.getpid()}") as stranger:
        assert stranger.stdout is not None
        stranger.stdout.readline()
        with pytest.raises(PermissionError, match=f"belongs to user {NOBODY}"):
            local_socket.connect(f"spec-taken-{os.getpid()}", LIMIT_S)
        assert stranger.stdout.readline() == "0\n"


def test_a_full_queue_is_waited_in():
    listener, name = local_socket.listen("spec-test")
    listener.listen(0)
    with listener, local_socket.connect(name, LIMIT_S):
        with pytest.raises(TimeoutError, match="did not accept within"):
            local_socket.connect(name, 0.1)
        with pytest.raises(DeadlineExceeded):
            SharedMemoryTransport().connect(f"shm:{name}:token", SCHEMA, 0.1)
        accepted = []
        timer = threading.Timer(0.2, lambda: accepted.append(local_socket.accept(listener)))
        timer.start()
        started = time.monotonic()
        with local_socket.connect(name, LIMIT_S) as end:
            assert 0.1 < time.monotonic() - started < LIMIT_S / 2
            assert not select.select([end], [], [], 0)[0]
        timer.join()
        accepted[0].close()


def test_a_closed_listener_ends_the_wait():
    listener, _ = local_socket.listen("spec-test")
    listener.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        local_socket.accept(listener)
