"""Parts of the backend that need no NPU: the environment of children, limits, options."""

import pytest
from pydantic import ValidationError

from spec_backend_ascend import host
from spec_backend_ascend.backend import AscendBackend, AscendConfig
from spec_core.errors import ConfigError

OURS = (
    "PYTORCH_NPU_ALLOC_CONF", "TASK_QUEUE_ENABLE", "HCCL_CONNECT_TIMEOUT", "HCCL_EXEC_TIMEOUT",
    "HCCL_BUFFSIZE", "HCCL_HOST_SOCKET_PORT_RANGE", "HCCL_NPU_SOCKET_PORT_RANGE",
    "ASCEND_RT_VISIBLE_DEVICES",
)  # fmt: skip


@pytest.fixture(autouse=True)
def eight_cards(monkeypatch):
    for name in OURS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(host, "num_devices", lambda: 8)


def child_env(*, share=1.0, local_rank=0, num_devices=1, **options):
    backend = AscendBackend(AscendConfig(name="ascend", **options))
    return backend.child_env("trainer", share, local_rank, num_devices)


def test_a_child_sees_its_own_cards_alone(monkeypatch):
    assert child_env(local_rank=3)["ASCEND_RT_VISIBLE_DEVICES"] == "3"
    assert child_env(local_rank=2, num_devices=2)["ASCEND_RT_VISIBLE_DEVICES"] == "2,3"
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "6,4, 7")
    assert child_env(local_rank=1, num_devices=2)["ASCEND_RT_VISIBLE_DEVICES"] == "4,7"


def test_a_card_that_is_not_there_is_an_error(monkeypatch):
    with pytest.raises(ConfigError, match=r"device 8.*shows 8"):
        child_env(local_rank=8)
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "5")
    with pytest.raises(ConfigError, match=r"2 devices from 0.*ASCEND_RT_VISIBLE_DEVICES=5"):
        child_env(num_devices=2)


@pytest.mark.parametrize("listed", ["", "all", "0,,1", "-1"])
def test_a_list_that_ascend_calls_invalid_is_an_error_with_its_remedy(monkeypatch, listed):
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", listed)
    with pytest.raises(ConfigError, match="unset it"):
        child_env()


def test_only_processes_that_share_a_card_let_hccl_choose_its_ports():
    assert child_env(share=0.5)["HCCL_HOST_SOCKET_PORT_RANGE"] == "auto"
    assert child_env(share=0.5)["HCCL_NPU_SOCKET_PORT_RANGE"] == "auto"
    assert "HCCL_HOST_SOCKET_PORT_RANGE" not in child_env()


def test_options_reach_the_child():
    env = child_env(
        hccl_connect_timeout_s=240,
        hccl_exec_timeout_s=680,
        hccl_buffer_mb=64,
        task_queue=0,
        allocator="max_split_size_mb:64",
    )
    assert env["HCCL_CONNECT_TIMEOUT"] == "240"
    assert env["HCCL_EXEC_TIMEOUT"] == "680"
    assert env["HCCL_BUFFSIZE"] == "64"
    assert env["TASK_QUEUE_ENABLE"] == "0"
    assert env["PYTORCH_NPU_ALLOC_CONF"] == "max_split_size_mb:64"


def test_what_the_caller_has_set_is_left_alone(monkeypatch):
    monkeypatch.setenv("HCCL_BUFFSIZE", "500")
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "2")
    assert not {"HCCL_BUFFSIZE", "TASK_QUEUE_ENABLE"} & child_env().keys()


@pytest.mark.parametrize(
    ("inherited", "given"),
    [
        ("expandable_segments:True", "expandable_segments:False"),
        ("page_size:1g, expandable_segments:True", "page_size:1g,expandable_segments:False"),
        ("", "expandable_segments:False"),
    ],
)
def test_memory_that_cannot_be_shared_is_not_inherited(monkeypatch, inherited, given):
    monkeypatch.setenv("PYTORCH_NPU_ALLOC_CONF", inherited)
    assert child_env()["PYTORCH_NPU_ALLOC_CONF"] == given


@pytest.mark.parametrize(
    "options", [{"hccl_connect_timeout_s": 60}, {"hccl_exec_timeout_s": 20}, {"ipc": "off"}]
)
def test_options_outside_what_hccl_takes_are_refused(options):
    with pytest.raises(ValidationError):
        AscendConfig(name="ascend", **options)


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.5])
def test_a_memory_limit_is_a_fraction(fraction):
    with pytest.raises(ConfigError, match="fraction"):
        AscendBackend(AscendConfig(name="ascend")).limit_memory(fraction)


def test_a_card_is_shared_without_a_daemon():
    backend = AscendBackend(AscendConfig(name="ascend"))
    assert backend.capabilities().num_devices == 8
    with backend.prepare_host("colocated"):
        pass
