"""A server keeps the requests that it was asked to keep, within its bounds, and counts all others."""

import asyncio
import json
import threading
import time

import pytest

from spec_kit.live_traffic import LiveRequests
from spec_kit.live_traffic.live_requests import LiveRequestsConfig, TakenRequests, route_of
from spec_processes.sockets.http_client import LONGEST_ANSWER


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def kept(clock: Clock | None = None, **fields: object) -> LiveRequests:
    return LiveRequests(LiveRequestsConfig(**{"share": 1.0, **fields}), clock or Clock(), timed=False)


def ask(
    requests: LiveRequests,
    body: bytes | str = "{}",
    learn: str = "",
    path: str = "/v1/completions",
    name: str = "a",
) -> bool:
    """Whether a request is admitted that comes in two parts."""
    body = body.encode() if isinstance(body, str) else body
    parts = [body[:9], body[9:]]

    async def receive() -> dict:
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    async def answer() -> bool:
        headers = [(b"x-draft-learn", learn.encode())] if learn else []
        reading = requests.begin({"path": path, "headers": headers}, receive)
        read = b"".join([(await reading())["body"], (await reading())["body"]])
        assert read == body
        return requests.admits(name)

    return asyncio.run(answer())


def left_out(requests: LiveRequests) -> dict[str, int]:
    return requests.take()["left_out"]


@pytest.mark.parametrize(
    ("fields", "request_", "reason"),
    [
        ({}, {}, ""),
        ({}, {"learn": "no"}, "opted_out"),
        ({}, {"learn": " NO"}, "opted_out"),
        *(
            ({}, {"learn": value}, "opted_out")
            for value in ("false", "0", "off", "never", '"no"', "none", "\x00", ",")
        ),
        *(({}, {"learn": value}, "opted_out") for value in ("true", "1", "yes!", '"yes"', "yes;no", "yes,")),
        ({"share": 1e-9}, {"learn": "\tYes "}, ""),
        ({"share": 1e-9}, {}, "not_sampled"),
        ({"share": 1e-9}, {"learn": "yes"}, ""),
        ({"opt_in": True}, {}, "not_opted_in"),
        ({"opt_in": True}, {"learn": "yes"}, ""),
        ({"routes": ["/v1/chat/completions"]}, {}, "route"),
        ({"routes": ["/v1/completions"]}, {}, ""),
        ({"models": ["m"]}, {"body": '{"model": "other"}'}, "model"),
        ({"models": ["m"]}, {}, "model"),
        ({"models": ["m"]}, {"body": '{"model": "m"}'}, ""),
        ({}, {"body": '{"store": false}'}, "store_false"),
        ({}, {"body": '{"store": false}', "learn": "yes"}, "store_false"),
        *(
            ({}, {"body": f'{{"store": {no}}}'}, "store_false")
            for no in ('"false"', "0", '""', '"no"', "[]", "{}", "0.0")
        ),
        *(({}, {"body": f'{{"store": {no}}}'}, "store_false") for no in ('"true"', "1", "1.0", "[true]")),
        ({}, {"body": '{"store": true}'}, ""),
        ({}, {"body": '{"store": null}'}, ""),
        ({}, {"body": '{"cache_salt": "mine"}'}, "cache_salt"),
        ({}, {"body": "[1]"}, "unreadable"),
        ({}, {"body": b"\xff{}"}, "unreadable"),
        ({}, {"body": "[" * 100_000}, "unreadable"),
        ({}, {"body": '{"prompt": "' + "x" * (1 << 18) + '"}'}, "too_long"),
    ],
)
def test_who_is_left_out_and_why(fields, request_, reason) -> None:
    requests = kept(**fields)
    assert ask(requests, **request_) is not bool(reason)
    assert left_out(requests) == ({reason: 1} if reason else {})


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([b"no", b"yes"], "opted_out"),
        ([b"yes", b"No"], "opted_out"),
        ([b"yes, no"], "opted_out"),
        ([b"yes", b"yes"], ""),
        ([b"yes", b"false"], "opted_out"),
        ([b"yes, maybe"], "opted_out"),
        ([b""], "opted_out"),
        ([b"\xff"], "opted_out"),
        ([], "not_opted_in"),
    ],
)
def test_a_refusal_among_repeated_headers_wins(values, reason) -> None:
    """A client and a proxy may both send the header."""
    requests = kept(opt_in=True)

    async def receive() -> dict:
        return {"body": b"{}"}

    async def answer() -> bool:
        headers = [(b"x-draft-learn", value) for value in values]
        await requests.begin({"path": "/generate", "headers": headers}, receive)()
        return requests.admits("a")

    assert asyncio.run(answer()) is not bool(reason)
    assert left_out(requests) == ({reason: 1} if reason else {})


@pytest.mark.parametrize(
    ("path", "prefix", "route"),
    [
        ("/spec/draft/status", "", "/spec/draft/status"),
        ("/llm/spec/draft/status", "/llm", "/spec/draft/status"),
        ("/llm/spec/draft/status", "/llm/", "/spec/draft/status"),
        ("/llm2/generate", "/llm", "/llm2/generate"),
        ("/generate", "/llm", "/generate"),
    ],
)
def test_a_route_is_the_path_behind_the_prefix_of_a_proxy(path, prefix, route) -> None:
    """The server of ASGI puts the prefix, ``root_path``, before the path; some frameworks do not."""
    assert route_of({"path": path, "root_path": prefix}) == route


HOSTILE = [
    b"x" * 100_000,
    "smörgåsbord".encode(),
    b"\xff\xfe\x00",
    b"code\r\nx-draft-learn: yes",
    b"code\n",
    b'code"} 1\nspec_follow_pushes_total 7',
    b"<script>alert(1)</script>",
    b"../../etc/passwd",
    b"_hidden",
    b"CODE",
    b"",
]


def labelled(requests: LiveRequests, label: bytes | None, path: str = "/ask") -> str:
    async def receive() -> dict:
        return {"body": b"{}"}

    async def answer() -> None:
        headers = [] if label is None else [(b"x-draft-label", label)]
        await requests.begin({"path": path, "headers": headers}, receive)()
        if requests.admits("a"):
            requests.add([1], [2], requests.label)

    asyncio.run(answer())
    (row,) = TakenRequests.decode(json.dumps(requests.take())).requests
    return row.label


def test_a_label_is_one_that_the_configuration_lists_and_otherwise_the_path() -> None:
    requests = kept(labels=["code", "team-7/chat"], routes=["/ask", "/v1/completions", "/a b", "/v1/x"])
    assert labelled(requests, b"code") == "code"
    assert labelled(requests, b" team-7/chat ", "/v1/completions") == "team-7/chat"
    assert labelled(requests, None) == "/ask"
    assert labelled(requests, None, "/v1/completions") == "/v1/completions"
    assert labelled(requests, None, "/a b") == "other", "a path that is no label is none"
    assert labelled(kept(), None) == "other"
    assert labelled(kept(), b"code") == "other"


@pytest.mark.parametrize("label", HOSTILE)
def test_no_client_makes_up_a_label(label) -> None:
    assert labelled(kept(labels=["code"]), label) in ("other", "code")


def test_a_request_of_no_task_has_no_label() -> None:
    assert kept().label == "other"


def test_every_prompt_of_a_request_is_asked_for_alike() -> None:
    requests = kept()

    async def two() -> list[bool]:
        async def receive() -> dict:
            return {"body": b'{"store": false}'}

        await requests.begin({"path": "/", "headers": []}, receive)()
        return [requests.admits("a-0"), requests.admits("a-1")]

    assert asyncio.run(two()) == [False, False]


def test_what_no_client_has_asked_is_left_out() -> None:
    requests = kept()
    assert not requests.admits("a")
    assert left_out(requests) == {"no_http": 1}


def test_a_hash_of_the_id_takes_the_share() -> None:
    requests = kept(share=0.25)
    chosen = [ask(requests, name=f"cmpl-{number}") for number in range(2000)]
    assert sum(chosen) == pytest.approx(500, abs=3 * (2000 * 0.25 * 0.75) ** 0.5)
    assert chosen[:50] == [ask(requests, name=f"cmpl-{number}") for number in range(50)]


def test_rows_bytes_and_age_are_bounded() -> None:
    clock = Clock()
    requests = kept(clock, rows=3, bytes=4 * 20, age_s=10)
    for number in range(5):
        requests.add([number], [7])
    taken = TakenRequests.decode(json.dumps(requests.take()))
    assert [row.prompt for row in taken.requests] == [[2], [3], [4]]
    assert (taken.left, taken.stored, taken.left_out) == (0, 5, {"overrun": 2})

    requests.add([1] * 9, [2] * 9)
    requests.add([3] * 9, [4] * 9)  # both would be 36 tokens
    requests.add([5] * 20, [6])  # by itself too many
    assert [row["prompt"] for row in requests.take()["requests"]] == [[3] * 9]
    requests.add([1], [])
    requests.add([1], [2])
    clock.now_s = 9.9
    requests.add([3], [4])
    clock.now_s = 10.0
    assert [row["prompt"] for row in requests.take()["requests"]] == [[3]]
    assert left_out(requests) == {"overrun": 3, "too_long": 1, "empty": 1, "expired": 1}


def test_what_is_too_old_goes_even_if_nobody_asks() -> None:
    requests = LiveRequests(LiveRequestsConfig(share=1.0, age_s=0.05))
    requests.add([1], [2])
    deadline = time.monotonic() + 30
    while requests._rows:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert left_out(requests) == {"expired": 1}


def test_an_answer_to_who_takes_is_one_that_the_client_reads() -> None:
    requests = kept(rows=50_000)
    ids = [2_000_000] * 100
    for number in range(20_000):
        requests.add(ids if number % 40 == 0 else [2_000_000], [2_000_000], "x" * 64)
    total, left = 0, 1
    while left:
        answer = requests.take()
        assert len(json.dumps(answer)) < LONGEST_ANSWER - 4096
        total, left = total + len(answer["requests"]), answer["left"]
    assert total == 20_000
    requests.add([1] * 16_383, [1])
    assert len(requests.take()["requests"]) == 1


def test_threads_lose_nothing() -> None:
    requests = kept(rows=10_000)

    def add() -> None:
        for _ in range(500):
            requests.add([1], [2])

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    taken = sum(len(requests.take()["requests"]) for _ in range(20))
    for thread in threads:
        thread.join()
    while rows := requests.take()["requests"]:
        taken += len(rows)
    assert taken == 2000


def test_an_error_is_counted_and_goes_nowhere(caplog) -> None:
    requests = kept()
    with requests.guarded():
        raise ValueError("the text of a request")
    assert left_out(requests) == {"error": 1}
    assert caplog.text == ""
