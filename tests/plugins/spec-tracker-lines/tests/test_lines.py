from __future__ import annotations

import json

import pytest
from spec_tracker_lines.tracker import LinesTracker

from spec_testing import TrackerSuite


class TestLines(TrackerSuite):
    @pytest.fixture
    def tracker(self):
        return LinesTracker

    @pytest.fixture
    def value(self, tmp_path):
        return str(tmp_path / "lines.jsonl")

    @pytest.fixture
    def failing_value(self, tmp_path):
        return str(tmp_path / "no such folder" / "lines.jsonl")

    def steps_of(self, folder):
        lines = (folder / "lines.jsonl").read_text().splitlines()
        return {json.loads(line)["step"] for line in lines}
