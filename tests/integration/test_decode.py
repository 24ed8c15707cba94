"""Runs that train on what their own engine decodes, on a target of the quickstart's kind, made smaller."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from spec_core import EngineAbilities
from spec_core.errors import RunError
from spec_draft_eagle3.draft import Eagle3Draft
from spec_engine_hf.engine import HfEngine
from spec_engine_sglang.engine import SglangEngine
from spec_trainer.cli.quickstart import run as quickstart
from spec_trainer.cli.quickstart.tiny_target import TinyTargetConfig
from spec_trainer.live import cycles
from spec_trainer.run.records import MeasurementRow, read_records
from spec_trainer.workers.decoded_folder import DecodedFolder

from . import launching

EVERY, STEPS = 10, 30
SIZE = quickstart.QuickstartSize(
    target=TinyTargetConfig(
        vocab_size=400,
        num_layers=8,
        hidden_size=64,
        num_heads=2,
        num_kv_heads=1,
        intermediate_size=128,
        seq_len=128,
        steps=60,
        shallow_steps=0,
    ),
    library=Path(asyncio.__file__).parent,
)
CHAIN = {"draft__num_steps": 3}
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
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[launching.Lab]:
    """Prompts of 24 tokens, six of them held out; answers are greedy."""
    folder = tmp_path_factory.mktemp("decode")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        files = quickstart.prepare_files(SIZE)
    with lab_of(folder, files.target, files.train) as lab:
        yield lab


@pytest.fixture(scope="module")
def untrained(tmp_path_factory, make_target, rows_file: Path) -> launching.Lab:
    """The same on a target of random weights, for what is refused before anything is decoded."""
    target = make_target("llama", max_position_embeddings=512)
    return lab_of(tmp_path_factory.mktemp("untrained"), target, rows_file)


def lab_of(folder: Path, target: Path, rows: Path) -> launching.Lab:
    keys = {
        "target": target, "data.path": rows, "data.eval_samples": 6, "data.max_length": 24,
        "train.steps": STEPS, "train.lr": 5e-3, "optimizer.betas": "[0.8,0.95]", "train.warmup_steps": 3,
        "train.global_batch_tokens": 400, "train.push_every": EVERY, "decode.every": EVERY,
        "decode.prompts": 16, "decode.max_new_tokens": 24, "decode.temperature": 0,
        "decode.num_draft_tokens": 3,
    }  # fmt: skip
    return launching.Lab(folder, keys, "")


@pytest.fixture(scope="module")
def undisturbed(lab: launching.Lab) -> Path:
    lab.train_here(lab.folder / "undisturbed", **CHAIN)
    return lab.folder / "undisturbed"


def summary(output: Path) -> dict:
    return json.loads((output / "summary.json").read_text())


def lengths(output: Path) -> list[float]:
    """Return the acceptance length on held-out prompts at the beginning of every cycle, and at the end."""
    return [cycle["held_out_acceptance_length"] for cycle in summary(output)["cycles"]]


@pytest.mark.slow
def test_with_pushes_the_engine_drafts_better_and_without_it_does_not_change(lab, undisturbed):
    first, *others = lengths(undisturbed)
    # How a processor rounds decides how soon: after ten steps 0.23 on one, above 0.25 on another.
    assert min(others) > first + 0.1
    assert others[-1] > first + 0.25
    end = summary(undisturbed)
    assert (end["acceptance_length_before"], end["acceptance_length"]) == (first, others[-1])
    records = launching.metrics(undisturbed)
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
    assert launching.losses(alone)[:EVERY] == launching.losses(undisturbed)[:EVERY]


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
    assert launching.newest_checkpoint(output) == EVERY
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
    launching.assert_bitwise_equal(output, undisturbed, STEPS)
    assert lengths(output) == lengths(undisturbed)
    assert launching.losses(output) == launching.losses(undisturbed)
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
    records, cycles = launching.metrics(output), summary(output)["cycles"]
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
    assert launching.losses(output) == pytest.approx(launching.losses(on_policy), rel=1e-3)
    assert summary(output).keys() == summary(on_policy).keys()
    for done in (output, on_policy):
        costs = [record["prefill_s"] for record in launching.metrics(done)]
        for index, cycle in enumerate(summary(done)["cycles"][:-1]):
            so_far = costs[index * EVERY : (index + 1) * EVERY]  # it begins anew in each cycle
            assert so_far == sorted(so_far)
            assert 0 < so_far[-1] <= cycle["prefill_s"] + 1e-3
    for decoder in (0, 1):
        assert "pushed in" in (output / f"logs/decoder-{decoder}.log").read_text()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            {"decode__every": 0, "train__push_every": 0},
            "decode.prompts=16 without decode.every: nothing is decoded",
        ),
        (
            {"train__push_every": 15},
            "train.push_every=15 with decode.every=10: the engine decodes between cycles",
        ),
        ({"push__to": "[http://127.0.0.1:1]"}, "decode.every=10 with push.to=http://127.0.0.1:1"),
        ({"push__canary_margin": 0.1}, "decode.every=10 with push.canary_margin=0.1"),
        ({"decode__replicas": 2}, "decode.replicas=2 with placement.kind=inline"),
        ({"data__features": "features"}, "decode.every=10 with data.features"),
        ({"decode__max_new_tokens": 5000}, "decode.max_new_tokens=5000 leaves no room for a prompt"),
        ({"placement__window_bytes": 1000}, "placement.window_bytes=1000 is smaller than a prompt"),
        (
            {"draft__name": "dflash", "decode__num_draft_tokens": 16},
            "draft 'dflash' guesses 15 tokens a round",
        ),
    ],
)
def test_what_does_not_go_with_decoding_is_refused_in_one_line(command_line, untrained, words, line):
    _, *keys = untrained.words(untrained.folder / "refused", **words)
    assert line in command_line("plan", *keys).error


@pytest.mark.parametrize(
    ("plugin", "ability", "lost", "line"),
    [
        (
            Eagle3Draft,
            "learns_from_guesses",
            False,
            "draft.name=eagle3: this draft does not learn",
        ),
        (
            HfEngine,
            "abilities",
            EngineAbilities(in_process=True),
            "engine.name=hf: this engine does not say which guesses it judged",
        ),
        (
            HfEngine,
            "abilities",
            EngineAbilities(in_process=True, guess_depths=True),
            "engine.name=hf: this engine takes no fresh weights while it serves",
        ),
    ],
)
def test_a_plugin_that_cannot_is_refused_in_one_line(
    command_line, untrained, monkeypatch, plugin, ability, lost, line
):
    monkeypatch.setattr(plugin, ability, lost)
    _, *keys = untrained.words(untrained.folder / "refused", decode__on_policy=True)
    assert line in command_line("plan", *keys).error


def test_answers_without_guess_depths_end_a_run_on_policy_in_one_line(command_line, untrained, monkeypatch):
    """An engine that can report them may be set so that it cannot: vLLM's adaptive verification is such a setting."""
    generate = HfEngine.generate
    monkeypatch.setattr(
        HfEngine,
        "generate",
        lambda *asked: [replace(answer, guess_depths=()) for answer in generate(*asked)],
    )
    output = untrained.folder / "without"
    few = {"decode__prompts": 2, "decode__max_new_tokens": 4, "data__eval_samples": 0, **CHAIN}
    outcome = command_line(*untrained.words(output, decode__on_policy=True, **few))
    assert "engine 'hf' did not say which guesses it judged" in outcome.error
    assert not (output / "decoded" / "cycle-0.jsonl").exists()


def test_a_draft_that_the_engine_does_not_serve_is_refused_in_one_line(command_line, untrained, monkeypatch):
    """SGLang is not installed here, so it lends its answer to the engine that is."""
    monkeypatch.setattr(HfEngine, "check_method", SglangEngine.check_method)
    one, two = (
        untrained.words(untrained.folder / "refused", draft__num_layers=layers)[1:] for layers in (1, 2)
    )
    assert command_line("plan", *one).code == 0
    line = "engine.name=sglang: it does not serve draft 'eagle3' with these options; its serving_methods name vllm"
    assert command_line("plan", *two).error.endswith(line)


NOT_DECODING = {
    "train__serve_every": 0,
    "decode__prompts": 64,
    "decode__max_new_tokens": 256,
    "decode__temperature": 1,
    "decode__num_draft_tokens": "null",
}
"""Nothing but defaults: a run that does not decode refuses others."""
MEASURED = {"decode__every": 0, "train__push_every": 0, "train__serve_every": EVERY}


@pytest.fixture(scope="module")
def measured(lab: launching.Lab) -> Path:
    lab.train_here(lab.folder / "measured", **MEASURED, **CHAIN)
    return lab.folder / "measured"


@pytest.mark.slow
def test_a_run_measures_its_draft_in_its_engine(lab, measured):
    records = launching.metrics(measured)
    measurements = [record for record in records if "serving_tokens_per_s" in record]
    assert [record["step"] for record in measurements] == [10, 20, 30]
    versions = [None] * 9 + [10] * 10 + [20] * 10 + [30]
    assert [record.get("serving_version") for record in records] == versions
    assert measurements[-1]["serving_acceptance_length"] > 1.25
    for record in measurements:
        assert 1 <= record["serving_acceptance_length_per_request"] <= 4
        assert len(record["serving_acceptance_per_position"]) == 3
        assert record["serve_wait_s"] > record["serving_s"] > 0
    end = summary(measured)
    assert end["acceptance_length"] == measurements[-1]["serving_acceptance_length"]
    assert end["time_s"]["serve"] == pytest.approx(sum(r["serve_wait_s"] for r in measurements))
    assert "The draft in the run's engine" in (measured / "report.html").read_text()
    weights = [folder / "model.safetensors" for folder in (measured / "decoded/draft-30", measured / "draft")]
    assert weights[0].read_bytes() == weights[1].read_bytes()

    alone = lab.folder / "not-measured"
    lab.train_here(alone, **MEASURED | NOT_DECODING, **CHAIN)
    assert launching.losses(alone) == launching.losses(measured)


@pytest.mark.slow
def test_workers_measure_what_one_process_does(lab, measured):
    """Rank 0 hears of it some steps later, and of the last draft before the end."""
    output = lab.folder / "measured-by-workers"
    lab.train(output, **MEASURED, **CHAIN, placement__kind="disaggregated", train__ranks=2)
    here, there = (
        read_records(run / "decoded/measurements.jsonl", MeasurementRow) for run in (measured, output)
    )
    for one, other in zip(here, there, strict=True):
        assert [one[key] for key in ("step", "serving_tokens")] == [
            other[key] for key in ("step", "serving_tokens")
        ]
        for key in ("serving_acceptance_length", "serving_acceptance_length_per_request"):
            assert one[key] == pytest.approx(other[key], abs=0.1)
    last = launching.metrics(output)[-1]
    assert last["serving_version"] == STEPS
    assert summary(output)["acceptance_length"] == last["serving_acceptance_length"]
    assert "pushed in" in (output / "logs/decoder-0.log").read_text()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ({"decode__every": 10}, "train.serve_every=10 with decode.every=10: its cycles measure the draft"),
        ({"decode__on_policy": True}, "decode.on_policy=True without decode.every: its answers are not"),
        (
            {"push__to": "[http://127.0.0.1:1]", "train__push_every": 5},
            "train.serve_every=10 with push.to=http",
        ),
        ({"data__features": "features"}, "train.serve_every=10 with data.features"),
        ({"data__eval_samples": 0}, "train.serve_every=10, but nothing is held out"),
        ({"decode__max_new_tokens": 5000}, "decode.max_new_tokens=5000 leaves no room for a prompt"),
        (
            {"placement__kind": "inline", "decode__replicas": 2},
            "decode.replicas=2 with placement.kind=inline",
        ),
    ],
)
def test_what_does_not_go_with_measuring_is_refused_in_one_line(command_line, untrained, words, line):
    _, *keys = untrained.words(untrained.folder / "refused", **MEASURED | words)
    assert line in command_line("plan", *keys).error
