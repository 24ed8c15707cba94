"""The example of examples/pictures at toy size: its draft is better than an untrained one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOY = {"--seeds": 1, "--target-steps": 40, "--rows": 32, "--prompts": 6, "--steps": 60}


@pytest.mark.slow
def test_the_example_trains_a_draft_on_pictures(tmp_path):
    sizes = [str(word) for pair in TOY.items() for word in pair]
    command = [sys.executable, "examples/pictures", "--output", str(tmp_path), *sizes]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    document = json.loads((tmp_path / "figures.json").read_text())
    (row,) = document["acceptance_length"]
    assert row["with pictures"] > row["untrained"] >= 1
    assert row["outputs_equal, with pictures"] is True
    assert f"{row['with pictures']:.2f}" in done.stdout.splitlines()[-1]
    pictures = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert len(pictures) == 32
    assert all(
        (tmp_path / one["messages"][0]["content"][0]["image_url"]["url"]).is_file() for one in pictures
    )
