"""Limit the device memory of each process, so that all processes on a device fit.

A limit (``Backend.limit_memory``, or an engine's use of ``EngineContext.memory_fraction``) counts what a process
allocates. It does not count the driver's context of each process. Nor does it count each trainer rank's window, the
memory for features in flight, if engines write into device memory. The device has to hold these too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spec_core.errors import ConfigError
from spec_core.wording import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spec_core import Role
    from spec_core.records import Capabilities
    from spec_trainer.configuration.run import PlacementConfig

GIB = 1 << 30
_ROUNDING = 1e-9


@dataclass(frozen=True)
class MemoryBudget:
    """The memory of one device, which is the same for all devices of a run."""

    capabilities: Capabilities
    window_bytes: int
    """Bytes of features in flight for each trainer rank."""

    def uncounted_bytes(self, role: Role) -> int:
        """Return the number of bytes of device memory that a process of ``role`` takes in addition to its limit."""
        held = self.window_bytes if role == "trainer" and self.capabilities.device_ipc else 0
        return self.capabilities.process_bytes + held

    def fractions(self, placement: PlacementConfig, roles: Sequence[Role]) -> dict[Role, float]:
        """Return the memory fraction of each role on a device that processes of ``roles`` share.

        All processes of a role divide the role's fraction. A role without a fraction in ``placement`` gets
        the rest. Raise ConfigError if the fractions and the uncounted bytes exceed the device.
        """
        options: dict[Role, float | None] = {
            "engine": placement.engine_fraction,
            "trainer": placement.trainer_fraction,
        }
        given = {role: fraction for role, fraction in options.items() if fraction is not None}
        left = 1 - self._uncounted_share(roles) - sum(given.values())
        if left < -_ROUNDING or (left <= 0 and len(given) < len(options)):
            raise ConfigError(self._refusal(given, roles))
        return {role: given.get(role, left / (len(options) - len(given) or 1)) for role in options}

    def even_fraction(self, roles: Sequence[Role]) -> float:
        """Return the memory fraction of each process on a device that processes of ``roles`` share evenly."""
        left = 1 - self._uncounted_share(roles)
        if left <= 0:
            raise ConfigError(self._refusal({}, roles))
        return left / len(roles)

    def _uncounted_share(self, roles: Sequence[Role]) -> float:
        if self.capabilities.device_bytes is None:
            return 0.0
        return sum(map(self.uncounted_bytes, roles)) / self.capabilities.device_bytes

    def _refusal(self, given: dict[Role, float], roles: Sequence[Role]) -> str:
        total = self.capabilities.device_bytes or 0
        ranks = roles.count("trainer")
        window = self.uncounted_bytes("trainer")
        wanted = [
            f"placement.{role}_fraction={fraction} ({_gib(fraction * total)})"
            for role, fraction in given.items()
        ]
        wanted.append(
            f"{counted(len(roles), 'process', 'processes')} with a context each "
            f"({_gib(len(roles) * self.capabilities.process_bytes)})"
        )
        if window > self.capabilities.process_bytes:
            wanted.append(
                f"the features in flight of {counted(ranks, 'trainer rank')} with "
                f"placement.window_bytes={self.window_bytes} ({_gib(ranks * self.window_bytes)})"
            )
        room = 1 - self._uncounted_share(roles)
        fitting = math.floor(1000 * room) / 1000
        lower = f"the fractions to {fitting} together, or " if given and room > 0 else ""
        return (
            f"a device of {_gib(total)} does not hold {', '.join(wanted)}"
            f"{'' if len(given) == 2 else ' and leave memory to the rest'}; lower {lower}placement.window_bytes "
            "(by default the features of two train.global_batch_tokens, or of a rank's shares of sixteen)"
        )


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
