"""TrackerSuite: the contract of spec_core.tracker (K1–K6) as tests.

::

    class TestMyTracker(TrackerSuite):
        @pytest.fixture
        def tracker(self) -> type[Tracker]:
            return MyTracker

        def steps_of(self, folder: Path) -> set[int]:
            return [...]  # of the runs below ``folder``, read from where the service keeps them
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import pytest

from spec_core.records import Availability
from spec_core.testing.conformance import ConformanceSuite, import_without_torch

if TYPE_CHECKING:
    from pathlib import Path

    from spec_core.tracker import Tracker

_SCALARS = {"loss": 2.0, "accuracy/0": 0.5}


class TrackerSuite(ConformanceSuite):
    """The contract of a tracker; ``tracker`` is the fixture that it needs."""

    @pytest.fixture
    def tracker(self) -> type[Tracker]:
        """Return the plugin's class, for a service that is there."""
        raise pytest.UsageError("a TrackerSuite needs a fixture 'tracker' that returns the plugin's class")

    @pytest.fixture
    def value(self) -> Any:
        """Return a value of the key ``track.NAME``."""
        return "project"

    @abstractmethod
    def steps_of(self, folder: Path) -> set[int]:
        """Return the steps that the service has of runs below ``folder``, where ``accuracy/0`` was logged."""

    def test_k1_the_client_is_found_without_an_error(self, tracker: type[Tracker]) -> None:
        """K1: probe says whether the client is installed."""
        assert isinstance(tracker.probe(), Availability)

    def test_k2_the_module_needs_no_torch(self, tracker: type[Tracker]) -> None:
        """K2: the plugin's module imports without torch."""
        import_without_torch(tracker)

    def test_k3_k4_k5_k6_a_resumed_run_goes_on(
        self, tracker: type[Tracker], value: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """K3, K4, K5, K6: scalars are kept, a run goes on where it was, and nothing is printed."""
        first, other = tmp_path / "one" / "run", tmp_path / "other" / "run"
        kept: list[dict[str, str]] = []
        for step, folder in ((1, first), (2, first), (1, other)):
            folder.mkdir(parents=True, exist_ok=True)
            opened = tracker(value, folder)
            opened.log(step, _SCALARS)
            opened.close()
            opened.close()
            kept.append({file.name: file.read_text() for file in folder.glob(".*") if file.is_file()})
        assert kept[0] == kept[1]
        assert not kept[0] or kept[0] != kept[2]
        assert self.steps_of(tmp_path) == {1, 2}
        assert capfd.readouterr().out == ""
