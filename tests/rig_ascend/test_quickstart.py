"""The quickstart on the stand-in, at the toy size of its own tests."""

import pytest

from spec_trainer.cli.quickstart import run as quickstart

from ..unit.trainer.cli.quickstart.test_run import TOY


@pytest.mark.filterwarnings(r"ignore:barrier\(\). using the device under current context")
def test_target_and_draft_are_trained_and_measured_on_a_card(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(quickstart, "HELD_OUT_ROWS", 3)
    summary = quickstart.run_quickstart("eagle3", "hf", tmp_path / "out", TOY, "ascend")
    assert summary["outputs_equal"] is True
    assert summary["generated_tokens"] == 16
    assert summary["acceptance_length"] >= 1
    assert "\n  name: ascend\n" in (tmp_path / "out/config.yaml").read_text()
