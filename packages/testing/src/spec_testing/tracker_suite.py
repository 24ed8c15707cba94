"""TrackerSuite tests the contract of spec_core.tracker (K1–K8).

::

    class TestMyTracker(TrackerSuite):
        @pytest.fixture
        def tracker(self) -> type[Tracker]:
            return MyTracker

        def steps_of(self, folder: Path) -> set[int]:
            return [...]  # of the runs below ``folder``, read from where the service keeps them
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from spec_core import Tracker
from spec_core.records import Availability
from spec_testing.conformance import ConformanceSuite, import_without_torch
from spec_testing.limits import patient

CLOSE_S = patient(60.0)
_SCALARS = {"loss": 2.0, "accuracy/0": 0.5}


class TrackerSuite(ConformanceSuite):
    """Tests of a tracker.

    A subclass must define the fixture ``tracker``, which returns the plugin's class.
    """

    @pytest.fixture
    def tracker(self) -> type[Tracker]:
        """Return the plugin's class; its service must be available."""
        raise pytest.UsageError("a TrackerSuite needs a fixture 'tracker' that returns the plugin's class")

    @pytest.fixture
    def value(self) -> Any:
        """Return a value of the key ``track.NAME``."""
        return "project"

    @pytest.fixture
    def failing_value(self) -> Any:
        """Return a value of ``track.NAME`` with which the service fails; by default the test of K7 is skipped."""
        return None

    def steps_of(self, folder: Path) -> set[int]:
        """Return the steps for which the service has the scalar ``accuracy/0``, of all runs below ``folder``."""
        raise pytest.UsageError(
            "a TrackerSuite needs a method 'steps_of' that reads back what the service has"
        )

    def test_k1_the_client_is_found_without_an_error(self, tracker: type[Tracker]) -> None:
        """K1: ``probe`` returns whether the client is installed, and does not raise."""
        assert isinstance(tracker.probe(), Availability)

    def test_k2_the_module_needs_no_torch(self, tracker: type[Tracker]) -> None:
        """K2: the plugin's module imports without torch."""
        import_without_torch(tracker)

    def test_k3_k4_k5_k6_a_resumed_run_goes_on(
        self, tracker: type[Tracker], value: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """K3, K4, K5, K6: scalars are stored, a resumed run is continued, and nothing is printed."""
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

    def test_k5_k8_calls_come_from_another_thread(
        self, tracker: type[Tracker], value: Any, tmp_path: Path
    ) -> None:
        """K5, K8: a tracker works if all calls come from one other thread, and ``close`` ends within a minute."""
        folder = tmp_path / "one" / "run"
        folder.mkdir(parents=True)

        def track() -> None:
            with tracker(value, folder) as opened:
                opened.log(1, _SCALARS)

        with ThreadPoolExecutor(1) as threads:
            threads.submit(track).result(CLOSE_S)

    def test_k7_a_service_that_fails_is_raised(
        self, tracker: type[Tracker], failing_value: Any, tmp_path: Path
    ) -> None:
        """K7: if the service fails, some call raises, so that the run can warn."""
        if failing_value is None:
            pytest.skip("no value is known for which the service fails (fixture failing_value)")
        with (
            pytest.raises(Exception),  # noqa: B017, PT011 (each service has errors of its own)
            tracker(failing_value, tmp_path) as opened,
        ):
            opened.log(1, _SCALARS)
