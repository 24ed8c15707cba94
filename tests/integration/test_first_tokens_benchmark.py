"""``first_tokens`` runs on a tiny target and prints one JSON document."""

import email
import json
from pathlib import Path

from spec_kit.layers import initial_weights as scales
from spec_trainer.cli.quickstart.run import QuickstartSize, prepare_files
from spec_trainer.cli.quickstart.tiny_target import TinyTargetConfig

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TARGET = TinyTargetConfig(
    vocab_size=300,
    num_layers=8,
    hidden_size=32,
    num_heads=1,
    num_kv_heads=1,
    intermediate_size=32,
    batch_size=2,
    steps=2,
)


def test_first_tokens_compares_scales_of_the_first_logits(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("LOGIT_STD", "LEAST_OWN_LOGIT"):  # the benchmark sets them: they are restored
        monkeypatch.setattr(scales, name, getattr(scales, name))
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import first_tokens

    files = prepare_files(QuickstartSize(target=TARGET, library=Path(email.__file__).parent))
    words = [
        "--logit-std", "inf", "0.1", "--steps", "2", "--every", "1", "--length", "40", "--option",
        "num_steps=2",
    ]  # fmt: skip
    first_tokens.main([str(files.target), str(files.train), *words])
    document = json.loads(capsys.readouterr().out)
    unscaled, scaled = (row["curve"] for row in document["rows"])
    assert [len(point["step_loss"]) for point in unscaled] == [2, 2, 2]
    assert unscaled[0]["tokens"] == 0 < unscaled[1]["tokens"] < unscaled[2]["tokens"]
    assert scaled[0]["loss"] < unscaled[0]["loss"]
    assert scaled[-1]["loss"] < scaled[0]["loss"]
