"""A Tracker sends the scalars of each step to a service, in addition to a run's metrics.jsonl.

Contract (``spec_testing.TrackerSuite`` quotes the numbers):

K1  ``probe`` says whether the service's client is installed; it never raises.
K2  The plugin's module imports without torch and without the service's client.
K3  ``log`` takes the scalars of a step. Steps ascend, but a run that resumes from a checkpoint repeats some steps.
K4  A new tracker for the same run directory continues the run of the previous tracker. Trackers store the data for
    this in the directory, in files whose names begin with a dot. Another directory of the same name is another
    run.
K5  ``close`` writes what is buffered, within a minute, and is idempotent.
K6  Nothing is printed to stdout, where commands print their results.
K7  If a call raises, the run warns with the tracker's name, continues, and never calls the tracker again. So
    a tracker raises the errors of its service. A call that hangs does not block the run; at its end a run
    waits for at most a minute.
K8  All calls, from the first on, come from one thread, which is not the main one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pydantic

from spec_core import config
from spec_core.records import Availability
from spec_core.resource import Resource


class Tracker(Resource):
    """A tracker sends scalars to a service. The module's docstring has the contract.

    A run uses the tracker NAME if its key ``track.NAME`` has any value but null and false.
    """

    API_VERSIONS: ClassVar[range] = range(1, 2)
    """Accepted versions of this interface (``docs/compatibility.md``)."""
    name: ClassVar[str]
    api_version: ClassVar[int]
    """Version of this interface that the plugin was written for."""
    Config: ClassVar[type[config.Config]] = config.Config
    Value: ClassVar[Any] = Annotated[str, pydantic.Field(min_length=1)]
    """Type of the value of ``track.NAME``, which pydantic validates; by default a string, such as a project's
    name."""
    default: ClassVar[Any] = None
    """Default of ``track.NAME``, None or False, with which a run does not use the tracker."""
    description: ClassVar[str] = ""
    """Sentence that describes ``track.NAME`` in the table of configuration keys."""

    def __init__(self, value: Any, folder: Path) -> None:
        """Store the value of ``track.NAME``, and the run directory, whose name is the run's name.

        A subclass connects to the service.
        """
        self.value = value
        self.folder = folder

    @classmethod
    def probe(cls) -> Availability:
        """Return whether the service's client is installed (K1)."""
        return Availability(ok=True)

    @abstractmethod
    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Log the scalars of a training step (K3)."""
