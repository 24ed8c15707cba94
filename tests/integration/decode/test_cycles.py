"""Runs that train on what their own engine decodes."""

from pathlib import Path

import pytest

from spec_core.errors import RunError
from spec_trainer.live import cycles
from spec_trainer.workers.decoded_folder import DecodedFolder

from .. import launching, run_directory
from .conftest import CHAIN, EVERY, STEPS, lengths

OPD = CHAIN | {"draft__opd": True}
BLOCKS = {"draft__name": "dflash", "draft__block_size": 4, "draft__num_layers": 2, "draft__loss": "soft"}
JUDGED_BLOCKS = {
    "draft__name": "dspark", "draft__block_size": 3, "draft__num_layers": 2, "draft__gamma": 2.0, "draft__opd": True,
}  # fmt: skip

ON_POLICY = {
    "decode__on_policy": True,
    "decode__prompts": 17,
    "data__eval_samples": 4,
    "train__steps": 2 * EVERY,
    "train__global_batch_tokens": 4096,
}


@pytest.fixture(scope="module")
def undisturbed(lab: launching.Lab) -> Path:
    lab.train_here(lab.folder / "undisturbed", **CHAIN)
    return lab.folder / "undisturbed"


@pytest.mark.slow
def test_with_pushes_the_engine_drafts_better_and_without_it_does_not_change(lab, undisturbed):
    first, *others = lengths(undisturbed)
    # How a processor rounds decides how soon: after ten steps 0.23 on one, above 0.25 on another.
    assert min(others) > first + 0.1
    assert others[-1] > first + 0.25
    end = run_directory.summary(undisturbed)
    assert (end["acceptance_length_before"], end["acceptance_length"]) == (first, others[-1])
    records = run_directory.metrics(undisturbed)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    served = [(r["serving_version"], r["serving_acceptance_length"]) for r in records]
    assert served == [(step // EVERY * EVERY, lengths(undisturbed)[step // EVERY]) for step in range(STEPS)]
    assert [cycle["draft_version"] for cycle in end["cycles"]] == [0, 10, 20, 30]
    assert "Decoding by the run's engine" in (undisturbed / "report.html").read_text()
    assert [path.name for path in (undisturbed / "decoded").glob("draft-*")] == [f"draft-{STEPS}"]
    weights = "model.safetensors"
    assert (undisturbed / f"decoded/draft-{STEPS}" / weights).read_bytes() == (
        undisturbed / "draft" / weights
    ).read_bytes()

    alone = lab.folder / "alone"
    lab.train_here(alone, train__push_every=0, **CHAIN)
    assert lengths(alone) == [first] * 4
    # Both have trained their first cycle on what the first draft has helped to decode.
    assert run_directory.losses(alone)[:EVERY] == run_directory.losses(undisturbed)[:EVERY]


@pytest.mark.slow
def test_a_run_that_is_killed_anywhere_ends_as_if_it_were_not(lab, undisturbed, monkeypatch):
    output = lab.folder / "disturbed"

    def fails(*args: object) -> None:
        raise RunError("planted")

    with monkeypatch.context() as patch:  # a checkpoint is there, its draft is not
        export = cycles.export_draft
        patch.setattr(
            cycles, "export_draft", lambda *args: (fails if args[-1].name == "draft-10" else export)(*args)
        )
        assert launching.cli.run(lab.words(output, **CHAIN)) == 1
    assert run_directory.newest_checkpoint(output) == EVERY
    with monkeypatch.context() as patch:  # prompts are answered, their answers are not there
        patch.setattr(DecodedFolder, "write_answers", fails)
        assert launching.cli.run(lab.words(output, **CHAIN)) == 1
    assert not (output / "decoded/cycle-1.jsonl").exists()
    decoded = output / "decoded/cycle-2.jsonl"
    run = lab.start(output, **CHAIN)
    run.until(decoded.exists)
    run.kill_everything()
    written = decoded.stat().st_mtime_ns
    lab.train_here(output, **CHAIN)
    assert decoded.stat().st_mtime_ns == written
    run_directory.assert_bitwise_equal(output, undisturbed, STEPS)
    assert lengths(output) == lengths(undisturbed)
    assert run_directory.losses(output) == run_directory.losses(undisturbed)
    complete = (output / "summary.json").read_text()
    lab.train_here(output, **CHAIN)
    assert (output / "summary.json").read_text() == complete


@pytest.fixture(scope="module", params=[OPD, BLOCKS, JUDGED_BLOCKS], ids=["eagle3", "dflash", "dspark"])
def on_policy(lab: launching.Lab, request: pytest.FixtureRequest) -> Path:
    output = lab.folder / f"on-policy-{len(request.param)}"
    lab.train_here(output, **ON_POLICY, **request.param)
    return output


@pytest.mark.slow
def test_on_policy_a_cycle_begins_with_what_the_engine_has_accepted(on_policy):
    """All answers of a cycle are one batch: in its first step the draft is the one that the engine drafted with."""
    output = on_policy
    records, cycles = run_directory.metrics(output), run_directory.summary(output)["cycles"]
    for cycle in (0, 1):
        accepted = cycles[cycle]["decode_acceptance_per_position"]
        assert records[cycle * EVERY]["accuracy"][0] == pytest.approx(accepted[0], abs=0.02)
    assert records[EVERY - 1]["loss"] < records[0]["loss"]
    assert lengths(output)[-1] > lengths(output)[0]


@pytest.mark.slow
@pytest.mark.parametrize("on_policy", [OPD], ids=["eagle3"], indirect=True)
def test_workers_do_what_one_process_does(lab, on_policy):
    """Each of two decoders answers a portion of a cycle's prompts, and gets the second draft by a push."""
    output = lab.folder / "workers"
    workers = {"placement__kind": "disaggregated", "train__ranks": 2, "decode__replicas": 2}
    lab.train(output, **ON_POLICY, **OPD, **workers)
    assert lengths(output) == lengths(on_policy)
    assert run_directory.losses(output) == pytest.approx(run_directory.losses(on_policy), rel=1e-3)
    assert run_directory.summary(output).keys() == run_directory.summary(on_policy).keys()
    for done in (output, on_policy):
        costs = [record["prefill_s"] for record in run_directory.metrics(done)]
        for index, cycle in enumerate(run_directory.summary(done)["cycles"][:-1]):
            so_far = costs[index * EVERY : (index + 1) * EVERY]  # it begins anew in each cycle
            assert so_far == sorted(so_far)
            assert 0 < so_far[-1] <= cycle["prefill_s"] + 1e-3
    for decoder in (0, 1):
        assert "pushed in" in (output / f"logs/decoder-{decoder}.log").read_text()
