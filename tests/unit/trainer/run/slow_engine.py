"""A dispatcher with engines that capture when the test says so."""

from concurrent.futures import Future

from spec_core.records import FeatureSchema
from spec_trainer.run.dispatch import Dispatcher

SCHEMA = FeatureSchema(layers=(1, 2), hidden_size=4, dtype="float32")


TOKEN = 2 * 4 * 4 + 8
"""Bytes of a token's features and id."""


class SlowEngine:
    """Captures nothing until told; remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.destinations: dict[int, tuple[str, ...]] = {}
        self.running: list[Future[None]] = []

    def capture(self, requests):
        self.asked.append([request.request_id for request in requests])
        self.destinations |= {request.request_id: request.destinations for request in requests}
        self.running.append(Future())
        return self.running[-1]

    def requests_for(self, destination: str) -> list[int]:
        return [request for request, to in self.destinations.items() if to == (destination,)]

    def finish(self) -> None:
        self.running.pop(0).set_result(None)


def dispatcher(schedule, engines, window_tokens, ranks=1) -> Dispatcher:
    addresses = [f"rank-{rank}" for rank in range(ranks)]
    return Dispatcher(
        schedule, SCHEMA, [engine.capture for engine in engines], addresses, window_tokens * TOKEN
    )
