"""Prometheus reads a page of figures; clients that send nothing or nonsense keep nobody from it."""

import http.client
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress

import pytest

from spec_core.errors import ConfigError
from spec_trainer.live.metrics_page import Metric, MetricsPage


@pytest.fixture
def page() -> Iterator[MetricsPage]:
    with MetricsPage("127.0.0.1:0") as page:
        yield page


def get(page: MetricsPage, path: str = "/metrics") -> tuple[int, str]:
    with closing(http.client.HTTPConnection("127.0.0.1", page.port, timeout=10)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def test_metrics_are_lines_of_the_text_format(page) -> None:
    assert get(page) == (200, "")
    page.show(
        [
            Metric("requests_total", "counter", "Requests that came.", 3),
            Metric("tau", "gauge", "Tokens.", {"a": 2.5, 'b"\\\n': 1}, "draft"),
            Metric("nothing", "gauge", "No sample.", {}, "draft"),
        ]
    )
    assert get(page) == (
        200,
        "# HELP spec_follow_requests_total Requests that came.\n"
        "# TYPE spec_follow_requests_total counter\n"
        "spec_follow_requests_total 3\n"
        "# HELP spec_follow_tau Tokens.\n"
        "# TYPE spec_follow_tau gauge\n"
        'spec_follow_tau{draft="a"} 2.5\n'
        'spec_follow_tau{draft="b\\"\\\\\\n"} 1\n',
    )
    assert get(page, "/")[0] == 404


def test_silent_and_senseless_clients_keep_nobody_out(page) -> None:
    page.show([Metric("steps", "gauge", "Steps.", 1)])
    with ExitStack() as stack:
        for number in range(60):
            one = stack.enter_context(socket.create_connection(("127.0.0.1", page.port)))
            one.sendall(b"\x00GET / \r" if number % 2 else b"GET /metrics HTTP/1.1\r\nA:")
        assert get(page)[0] == 200


def test_after_its_end_nobody_listens() -> None:
    page = MetricsPage("127.0.0.1:0")
    with socket.create_connection(("127.0.0.1", page.port)) as silent:
        page.close()
        page.close()
        silent.settimeout(10)
        with suppress(ConnectionResetError):
            assert silent.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", page.port))


@pytest.mark.parametrize("address", ["9400", "127.0.0.1:x", "192.0.2.1:0", "127.0.0.1:70000"])
def test_an_address_that_is_none_of_this_host_is_refused(address) -> None:
    with pytest.raises(ConfigError, match=r"follow\.metrics=.*expected host:port of this host"):
        MetricsPage(address)


def test_a_port_in_use_is_refused(page) -> None:
    with pytest.raises(ConfigError, match="with a free port"):
        MetricsPage(f"127.0.0.1:{page.port}")
