"""``initial_weights`` runs at toy size and prints one JSON document."""

import json
from pathlib import Path

from spec_kit.layers import initial_weights as scales

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_initial_weights_tells_schemes_apart(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("MATRIX_GAIN", "FUSION_GAIN", "LOGIT_STD"):  # the benchmark sets them: they are restored
        monkeypatch.setattr(scales, name, getattr(scales, name))
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import initial_weights

    initial_weights.main(["--toy", "--seed", "0", "--gains", "0.5", "0.03", "--gains", "1", "1"])
    document = json.loads(capsys.readouterr().out)
    rows = document["rows"]
    assert len({row["held_out_loss"] for row in rows}) == 2
    assert all(1 <= row["acceptance_length"] <= 5 and row["standard_error"] >= 0 for row in rows)
    assert [row["draws"] for row in document["summary"]] == [1, 1]
    assert {"torch", "spec-core"} <= document["versions"].keys()
