"""Drafts whose weights SGLang's scheduler cannot exchange."""

import pytest
from tests.unit.engine_sglang.played_scheduler import BlockDraft, Scheduler, slot_of

from spec_core.errors import EngineError


@pytest.mark.parametrize(
    ("algorithm", "changes", "problem"),
    [
        ("EAGLE", {}, "EAGLE takes no fresh weights here"),
        ("EAGLE3", {"dp_size": 2}, "data- or pipeline-parallel"),
    ],
)
def test_drafts_that_cannot_be_exchanged_are_refused(algorithm, changes, problem) -> None:
    with pytest.raises(EngineError, match=problem):
        slot_of(Scheduler.serving(algorithm, **changes))


@pytest.mark.parametrize("method", ["_fused_kv_write_bundle", "_stacked_ctx_kv_params"])
def test_a_block_whose_weights_are_copied_elsewhere_is_refused(monkeypatch, method) -> None:
    monkeypatch.setattr(BlockDraft, method, lambda self: None, raising=False)
    with pytest.raises(EngineError, match="keeps copies of a DSpark draft's weights"):
        slot_of(Scheduler.serving("DSPARK"))


def test_a_quantized_draft_is_refused() -> None:
    scheduler = Scheduler.serving()
    scheduler.draft_worker.draft_worker.model_runner.model_config.quantization = "fp8"
    with pytest.raises(EngineError, match=r"has quantized the draft \(fp8\)"):
        slot_of(scheduler)
