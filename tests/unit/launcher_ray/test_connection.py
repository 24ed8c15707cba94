"""A Ray that starts late, or not at all, and addresses of clusters by who names them."""

import subprocess

import psutil
import pytest

from spec_core.errors import ConfigError, RunError
from spec_testing.launcher_bench import assert_soon

ray = pytest.importorskip("ray")
connection = pytest.importorskip("spec_launcher_ray.connection")
config = pytest.importorskip("spec_launcher_ray.config")

SLOW = "The current node timed out during startup. This could happen because some of the raylet failed"


@pytest.fixture
def failing_ray(monkeypatch):
    """``failing_ray(errors)``: Ray fails with each of these in turn, and starts afterwards; returns its calls."""

    left = []

    def install(errors):
        calls = []

        def init(address, **options):
            calls.append(address)
            if len(calls) <= len(errors):
                left.append(subprocess.Popen(["sleep", "600"]))  # Ray leaves what it has started
                raise errors[len(calls) - 1]

        monkeypatch.setattr(ray, "init", init)
        return calls

    yield install
    for process in left:
        process.kill()
        process.wait()


def sleeping():
    return [
        child
        for child in psutil.Process().children()
        if child.name() == "sleep" and child.status() != "zombie"
    ]


def test_a_slow_ray_is_started_again(failing_ray, caplog):
    calls = failing_ray([Exception(SLOW), RuntimeError("no port")])
    connection.start_cluster()
    assert calls == ["local"] * 3
    assert_soon(lambda: not sleeping())
    assert caplog.messages == [
        f"Ray does not start on this host: Exception: {SLOW} (try 1 of 4); it is started again",
        "Ray does not start on this host: RuntimeError: no port (try 2 of 4); it is started again",
    ]


def test_a_ray_that_does_not_start_is_one_line(failing_ray):
    calls = failing_ray([Exception(f"{SLOW}\nand more")] * 9)
    words = (
        rf"^Ray does not start on this host: Exception: {SLOW} \(try 4 of 4\); see \S+/session_latest/logs$"
    )
    with pytest.raises(RunError, match=words):
        connection.start_cluster()
    assert len(calls) == 4
    assert_soon(lambda: not sleeping())


def test_what_time_does_not_mend_is_not_tried_again(failing_ray):
    calls = failing_ray([ValueError("the object store is too small")] * 9)
    with pytest.raises(RunError, match=r"the object store is too small \(try 1 of 4\); see "):
        connection.start_cluster()
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("key", "variable", "named"),
    [
        ("127.0.0.1:1", "127.0.0.1:2", "launcher.address=127.0.0.1:1"),
        (None, "127.0.0.1:2", "RAY_ADDRESS=127.0.0.1:2"),
        (None, "ray://127.0.0.1:2", "RAY_ADDRESS=ray://127.0.0.1:2"),
    ],
)
def test_an_error_names_who_has_named_the_address(monkeypatch, key, variable, named):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    address = connection.named_address(config.RayConfig(address=key), variable)
    with pytest.raises(ConfigError, match=f"^{named}: "):
        connection.check_address(address)


def test_any_error_of_ray_names_the_address(failing_ray):
    failing_ray([Exception("what\nno version foresees")])
    words = "^RAY_ADDRESS=auto cannot be used: Exception: what$"
    with pytest.raises(ConfigError, match=words):
        connection.connect_cluster(connection.ClusterAddress("auto", "RAY_ADDRESS"))


def test_without_an_address_a_cluster_is_started(monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    assert connection.named_address(config.RayConfig(), None) is None
    assert connection.named_address(config.RayConfig(), "") is None
