"""Client of the streams that a rig opens in an engine's process (``rig_streams``), and what it measures."""

import http.client
import threading
import time
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Self


class Client:
    """Reads by HTTP when an engine's streamed requests begin, and when each part of their answers comes.

    A line says when it was written. So a busy machine, where a client reads late, changes nothing but ``late_s`` and
    ``read``.
    """

    def __init__(self, port: int) -> None:
        self.parts: dict[str, list[tuple[float, int]]] = defaultdict(list)
        """Request -> when its parts were written, the number of tokens of each; the first one is its beginning."""
        self.read: dict[str, list[tuple[float, int]]] = defaultdict(list)
        """The same, by when this client has read them."""
        self.late_s: list[float] = []
        self._port = port
        self._response = self._get("/")
        assert self._response.readline() == b"open\n"
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _get(self, path: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        connection.request("GET", path)
        return connection.getresponse()

    def _read(self) -> None:
        while (line := self._response.readline()) not in (b"end\n", b""):
            now = time.monotonic()
            name, written, tokens = line.decode().split()
            self.late_s.append(now - float(written))
            self.parts[name].append((float(written), int(tokens)))
            self.read[name].append((now, int(tokens)))

    def end(self) -> None:
        """Have an engine that lives on end the stream."""
        self._get("/end")
        self.join()

    def join(self) -> None:
        """Wait until all that was streamed is read."""
        self._reader.join(60)
        assert not self._reader.is_alive()
        assert min(self.late_s, default=0) >= 0

    def times(self, requests: slice, tokens: int, *, as_read: bool = False) -> tuple[float, float]:
        """Mean time to the first token and inter-token latency of some requests, in milliseconds.

        ``requests`` counts, in the order in which they began, those with so many ``tokens``: a warm-up has fewer.
        """
        firsts, per_token = [], []
        found = self.whole(tokens, as_read=as_read)[requests]
        for (begun, _), (first, _), *_, (last, _) in found:
            firsts.append(first - begun)
            per_token.append((last - first) / (tokens - 1))
        return 1e3 * fmean(firsts), 1e3 * fmean(per_token)

    def whole(self, tokens: int, *, as_read: bool = False) -> list[list[tuple[float, int]]]:
        """The parts of each request with so many tokens, in the order in which they began."""
        streams = (self.read if as_read else self.parts).values()
        return [parts for parts in streams if sum(number for _, number in parts) == tokens]


class Watch:
    """Connects to every process that opens streams in a folder, in the order in which they do."""

    def __init__(self, folder: Path) -> None:
        self.clients: list[Client] = []
        self._folder = folder
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        for client in self.clients:
            client.join()

    def _look(self) -> None:
        seen: set[Path] = set()
        while not self._over.wait(0.02):
            for file in sorted(set(self._folder.glob("streams-*[0-9]")) - seen):
                seen.add(file)
                self.clients.append(Client(int(file.read_text())))
