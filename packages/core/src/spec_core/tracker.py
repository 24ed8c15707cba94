"""Tracker: a service that gets the scalars of each step, besides a run's metrics.jsonl.

Contract (``spec_testing.TrackerSuite`` quotes the numbers):

K1  ``probe`` says whether the service's client is installed; it never raises.
K2  The plugin's module imports without torch and without the client: nobody needs what nobody has asked for.
K3  ``log`` takes the scalars of a step. Steps ascend, but a run that goes on from a checkpoint repeats some.
K4  A tracker that is made again for a run directory goes on where the one before it was: what it has to know for that
    lies in files of that directory whose names begin with a dot. Another directory of that name is another run.
K5  ``close`` writes what is buffered, within a minute, and is idempotent.
K6  Nothing goes to stdout, where commands print their documents.
K7  Whatever a call raises, the run warns with the tracker's name, goes on without it and calls it no more; so a
    service that fails is raised, not hidden. A call that hangs holds nobody up; at its end a run waits a minute.
K8  All calls, from the first on, come from one thread, which is not the main one.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import pydantic

from spec_core.config import TrackerConfig
from spec_core.records import Availability
from spec_core.resource import Resource

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class Tracker(Resource):
    """A tracker takes scalars. The module's docstring is the contract.

    The key ``track.NAME`` of a run asks for the tracker of that name: any value but null and false.
    """

    API_VERSIONS: ClassVar[range] = range(2, 3)
    """Versions of this interface that are accepted; newest first: 2, of the first release."""
    name: ClassVar[str]
    api_version: ClassVar[int]
    """The version that the plugin was written for."""
    Config: ClassVar[type[TrackerConfig]] = TrackerConfig
    Value: ClassVar[Any] = Annotated[str, pydantic.Field(min_length=1)]
    """Type of the key's value, any that pydantic knows; by default a text, such as a project's name."""
    default: ClassVar[Any] = None
    """The key's value where nobody asks: null or false."""
    description: ClassVar[str] = ""
    """Sentence on the key, for the table of keys."""

    def __init__(self, value: Any, folder: Path) -> None:
        """Keep the key's value and the run directory, whose name is the run's; a subclass opens the service."""
        self.value = value
        self.folder = folder

    @classmethod
    def probe(cls) -> Availability:
        """Return whether the service's client is installed (K1)."""
        return Availability(ok=True)

    @abstractmethod
    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take the scalars of a step (K3)."""
