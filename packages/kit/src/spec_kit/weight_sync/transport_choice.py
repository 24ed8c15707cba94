"""TransportChoice chooses the weight transport that sends an update to the ranks of a replica."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from spec_core.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from spec_core import WeightMedium, WeightTransport
    from spec_kit.weight_sync.publisher_link import RankEnd


class ChosenTransport(NamedTuple):
    """The transport that was chosen for one update."""

    name: str
    transport: WeightTransport
    not_taken: Mapping[str, str]
    """Name of each other transport -> why it was not chosen."""


class TransportChoice:
    """Chooses one of a publisher's transports for each replica."""

    def __init__(
        self, transports: Mapping[str, WeightTransport], device: torch.device, *, fastest_first: bool
    ) -> None:
        """Use the first of ``transports`` that reaches a replica, or the fastest if ``fastest_first`` is set.

        ``device``: device of the sender.
        """
        self._transports = transports
        self._device = device
        self._fastest_first = fastest_first

    def towards(self, replica: str, ends: Sequence[RankEnd]) -> ChosenTransport:
        """Return a transport that reaches every rank of ``replica``. Raise EngineError if none does."""
        obstacles: dict[str, str] = {}
        media: dict[str, WeightMedium] = {}
        for name, transport in self._transports.items():
            found = [self._obstacle(name, transport, end) for end in ends]
            if any(found):
                obstacles[name] = next(filter(None, found))
            else:
                media[name] = max(transport.medium(end.locations[name], self._device) for end in ends)
        if not media:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in obstacles.items())
            raise EngineError(
                f"no weight transport reaches replica {replica!r} ({reasons or 'none is given'})"
            )
        taken = min(media, key=lambda name: media[name]) if self._fastest_first else next(iter(media))
        slower = {name: self._comparison(medium, media[taken]) for name, medium in media.items()}
        not_taken = {name: reason for name, reason in (obstacles | slower).items() if name != taken}
        return ChosenTransport(taken, self._transports[taken], not_taken)

    def _comparison(self, medium: WeightMedium, taken: WeightMedium) -> str:
        if not self._fastest_first or medium == taken:
            return "named later"
        return f"{medium}, slower than {taken}"

    def _obstacle(self, name: str, transport: WeightTransport, end: RankEnd) -> str:
        if name in end.unusable:
            return f"rank {end.rank} cannot use it: {end.unusable[name]}"
        if name not in end.locations:
            return f"rank {end.rank} does not have it"
        return transport.obstacle(end.locations[name], self._device)
