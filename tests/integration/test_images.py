"""Runs on a target that sees: every draft trains on rows with pictures, with an engine and from features."""

import functools
import json
import shutil
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from spec_core.records import Availability
from spec_engine_hf.engine import HfEngine
from spec_engine_sglang.engine import SglangEngine
from spec_engine_sglang.serving import SglangServing
from spec_trainer.cli.app import run
from spec_trainer.measure.evaluation.tables import evaluation_lines

from ..seeing_targets import ALL_SEEING, IMAGE_ID, SEEING
from .run_directory import losses

ROWS = 12


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    """Rows about random pictures, two in each third row, and rows of text; below them the pictures."""
    folder = tmp_path_factory.mktemp("pictures")
    random = np.random.default_rng(0)
    rows = []
    for number in range(ROWS):
        names = [f"{number}-{index}.png" for index in range((1, 0, 2)[number % 3])]
        for name in names:
            pixels = random.integers(0, 256, (16, 16 + 8 * (number % 2), 3), dtype=np.uint8)
            file = BytesIO()
            Image.fromarray(pixels).save(file, "PNG")
            (folder / name).write_bytes(file.getvalue())
        parts = [{"type": "image", "image": name} for name in names]
        parts.append({"type": "text", "text": "What is seen?"})
        rows.append(
            {
                "messages": [
                    {"role": "user", "content": parts},
                    {"role": "assistant", "content": f"A picture, number {number}."},
                ]
            }
        )
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def words(seeing_target, pictures):
    """``words(command, model_type, output, …)``: a command line on the pictures."""

    def line(command: str, model_type: str, output: Path | None, *more: str) -> list[str]:
        inputs = ["--target", str(seeing_target(model_type)), "--data", str(pictures / "rows.jsonl")]
        written = [] if output is None else ["--output", str(output)]
        return [command, *inputs, *written, f"data.media_root={pictures}", "data.eval_samples=3", *more]

    return line


TRAIN = (
    "train.global_batch_tokens=200", "train.warmup_steps=1", "train.epochs=1", "train.eval_every=2",
    "train.save_every=1",
)  # fmt: skip
DRAFTS = {
    "eagle3": ("draft.name=eagle3", "draft.num_steps=2"),
    "dflash": ("draft.name=dflash", "draft.num_layers=1", "draft.block_size=4"),
}

# A chain and blocks, each with another type; the other pairs each night.
PAIRS = [
    pytest.param(model_type, draft, marks=[pytest.mark.slow] if place != number else [])
    for place, model_type in enumerate(SEEING)
    for number, draft in enumerate(DRAFTS)
]


@pytest.fixture(scope="module")
def online(words, tmp_path_factory):
    """``online(model_type, settings)``: the directory of a run with an engine and a draft of these settings."""

    @functools.cache
    def train(model_type: str, draft: tuple[str, ...]) -> Path:
        output = tmp_path_factory.mktemp(model_type) / "run"
        assert run(words("train", model_type, output, *TRAIN, *draft)) == 0
        return output

    return train


@pytest.mark.parametrize(("model_type", "draft"), PAIRS)
def test_drafts_train_on_pictures_with_an_engine_and_from_features(
    words, online, tmp_path, model_type, draft
):
    settings, features = (*TRAIN, *DRAFTS[draft]), tmp_path / "features"
    assert run(words("capture", model_type, features, *DRAFTS[draft])) == 0
    assert run(words("train", model_type, tmp_path / "offline", *settings, f"data.features={features}")) == 0
    output = online(model_type, DRAFTS[draft])
    assert len(losses(output)) > 2
    assert losses(output) == pytest.approx(losses(tmp_path / "offline"), rel=1e-4)
    config = json.loads((output / "draft" / "config.json").read_text())
    assert "mrope" not in json.dumps(config)
    assert config["rope_parameters"]["rope_theta"] == 1e4
    assert config["vocab_size"] == IMAGE_ID + 2


MERGED = (*DRAFTS["eagle3"], "draft.image_embeddings=merged")


def test_a_draft_with_embeddings_of_images_trains_from_features_and_resumes(words, online, tmp_path):
    """A folder of its features serves a draft with the placeholder's, too, but not the other way round."""
    merged, placeholder = (online("qwen2_5_vl", draft) for draft in (MERGED, DRAFTS["eagle3"]))
    features = tmp_path / "features"
    assert run(words("capture", "qwen2_5_vl", features, *MERGED)) == 0
    for output, draft in ((merged, MERGED), (placeholder, DRAFTS["eagle3"])):
        offline = tmp_path / f"offline-{len(draft)}"
        assert run(words("train", "qwen2_5_vl", offline, *TRAIN, *draft, f"data.features={features}")) == 0
        assert losses(output) == pytest.approx(losses(offline), rel=1e-4)
    assert losses(merged)[0] != pytest.approx(losses(placeholder)[0], rel=1e-6)
    copy = shutil.copytree(merged, tmp_path / "copy")
    (copy / "summary.json").unlink()
    assert run(words("train", "qwen2_5_vl", copy, *TRAIN, *MERGED, "train.resume_from=step-2")) == 0
    assert losses(copy) == losses(merged)
    name = "draft/model.safetensors"
    assert (copy / name).read_bytes() == (merged / name).read_bytes()


def test_features_without_the_embeddings_do_not_train_a_draft_that_reads_them(words, tmp_path, command_line):
    features = tmp_path / "features"
    assert run(words("capture", "qwen2_5_vl", features, *DRAFTS["eagle3"])) == 0
    line = words("plan", "qwen2_5_vl", tmp_path / "run", *MERGED, f"data.features={features}")
    assert "holds layers [2, 4, 5, 8], draft eagle3 needs [0, 2, 4, 5, 8]" in command_line(*line).error


def test_targets_that_scale_their_embeddings_have_none_for_a_draft(words, tmp_path, command_line):
    line = words("plan", "gemma4", tmp_path / "run", *MERGED)
    assert "set draft.image_embeddings=placeholder" in command_line(*line).error


@pytest.mark.slow
def test_engine_in_a_process_of_its_own_gets_the_images(words, online, tmp_path):
    settings = (*TRAIN, *DRAFTS["dflash"], "placement.kind=disaggregated")
    assert run(words("train", "qwen3_vl", tmp_path / "run", *settings)) == 0
    assert losses(online("qwen3_vl", DRAFTS["dflash"])) == pytest.approx(losses(tmp_path / "run"), rel=1e-4)


def test_features_of_other_images_are_refused(words, pictures, tmp_path, command_line):
    """The token ids are the same: only the pictures tell the samples apart."""
    features, names = tmp_path / "features", sorted(pictures.glob("*.png"))
    assert run(words("capture", "qwen2_5_vl", features, *DRAFTS["eagle3"])) == 0
    assert run(["capture", "--verify", str(features)]) == 0
    before = names[0].read_bytes()
    pixels = np.asarray(Image.open(names[0]))
    Image.fromarray(255 - pixels).save(names[0])
    try:
        offline = words(
            "plan", "qwen2_5_vl", tmp_path / "run", *DRAFTS["eagle3"], f"data.features={features}"
        )
        assert f"data.features={features} holds no features of 1 of {ROWS}" in command_line(*offline).error
        again = words("capture", "qwen2_5_vl", features, *DRAFTS["eagle3"])
        assert "holds other features (data" in command_line(*again).error
    finally:
        names[0].write_bytes(before)


@pytest.mark.parametrize(
    ("command", "more", "problem"),
    [
        ("plan", ("decode.every=1",), "or train.serve_every, prompts of text alone are answered"),
        ("plan", ("train.serve_every=1",), "prompts of text alone are answered"),
        ("plan", ("data.media_root=/nowhere",), "cannot be read"),
        ("follow", ("follow.servers=[http://127.0.0.1:9]",), "follow trains on text alone"),
    ],
)
def test_what_does_not_take_images_says_so(
    words, tmp_path, command_line, monkeypatch, command, more, problem
):
    # Whether it is installed or not.
    monkeypatch.setattr(SglangEngine, "probe", classmethod(lambda _: Availability(ok=True)))
    line = words(command, "qwen2_5_vl", tmp_path / "run", *DRAFTS["eagle3"], *more)
    assert problem in command_line(*line).error
    assert not (tmp_path / "run").exists()


def test_an_engine_takes_images_for_the_types_that_it_names(
    words, seeing_target, tmp_path, command_line, monkeypatch
):
    monkeypatch.setattr(SglangEngine, "probe", classmethod(lambda _: Availability(ok=True)))
    monkeypatch.setattr(SglangServing, "availability", lambda *_: Availability(ok=True))
    line = words("plan", "gemma4", tmp_path / "run", *DRAFTS["eagle3"], "--engine", "sglang")
    types = "qwen2_5_vl_text, qwen3_5_moe_text, qwen3_5_text, qwen3_vl_moe_text, qwen3_vl_text"
    assert f"takes images for targets of the types {types} alone" in command_line(*line).error
    line[line.index("--target") + 1] = str(seeing_target("qwen3_5"))
    assert command_line(*line).code == 0


def test_an_engine_without_images_takes_no_target_that_sees(words, tmp_path, command_line, monkeypatch):
    monkeypatch.setattr(SglangEngine, "probe", classmethod(lambda _: Availability(ok=True)))
    monkeypatch.setattr(SglangEngine, "abilities", replace(SglangEngine.abilities, images=False))
    line = words("plan", "qwen2_5_vl", tmp_path / "run", *DRAFTS["eagle3"], "--engine", "sglang")
    assert "sees images, which engine 'sglang' does not capture" in command_line(*line).error


@pytest.fixture(scope="module")
def evaluation(seeing_target, online):
    """``evaluation(model_type, prompts, …)``: a command line that evaluates the draft of a run."""

    def line(model_type: str, prompts: Path, *more: str, draft=DRAFTS["eagle3"]) -> list[str]:
        target = str(seeing_target(model_type))
        inputs = ["--target", target, "--draft-model", str(online(model_type, draft) / "draft")]
        return ["evaluate", *inputs, "--prompts", str(prompts), "--max-new-tokens", "8", *more]

    return line


# What each type answers to an image, tests/unit/engine_hf/test_images.py compares.
@pytest.mark.parametrize(
    "model_type", ["qwen2_5_vl", *(pytest.param(one, marks=pytest.mark.slow) for one in ALL_SEEING[1:])]
)
def test_evaluate_counts_images_and_text_apart(evaluation, pictures, tmp_path, capsys, model_type):
    report = tmp_path / "report.html"
    options = (f"data.media_root={pictures}", "--no-stop-at-eos", "--temperature", "0")
    line = evaluation(model_type, pictures / "rows.jsonl", *options, "--untrained", "--report", str(report))
    capsys.readouterr()
    assert run([*line, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["outputs_equal"] is True
    text, images = document["inputs"]["text"], document["inputs"]["images"]
    assert (text["prompts"], text["images"]) == (4, 0)
    assert (images["prompts"], images["images"]) == (8, 12)
    for key in ("rounds", "accepted", "generated_tokens"):
        assert text[key] + images[key] == document[key]
    for figures in (text, images):
        assert figures["outputs_equal"] is True
        assert figures["acceptance_length"] == 1 + figures["accepted"] / figures["rounds"]
        assert figures["acceptance_length_before"] >= 1
    assert "Text and images" in report.read_text()
    lines = list(evaluation_lines(document))
    start = next(place for place, text in enumerate(lines) if text.startswith("prompts of"))
    rows_of = [text.split()[:3] for text in lines[start + 1 : start + 3]]
    assert rows_of == [["text", "4", "0"], ["images", "8", "12"]]
    # Each part by itself has the same rounds.
    rows = [json.loads(line) for line in (pictures / "rows.jsonl").read_text().splitlines()]
    seen = [row for row in rows if len(row["messages"][0]["content"]) > 1]
    alone = tmp_path / "images.jsonl"
    alone.write_text("".join(f"{json.dumps(row)}\n" for row in seen))
    assert run([*evaluation(model_type, alone, *options), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert list(again["inputs"]) == ["images"]
    assert again["rounds"] == images["rounds"]
    assert again["accepted"] == images["accepted"]


def test_evaluate_takes_a_draft_with_the_targets_embeddings_of_images(evaluation, pictures, capsys):
    options = (f"data.media_root={pictures}", "--no-stop-at-eos", "--temperature", "0", "--json")
    line = evaluation("qwen2_5_vl", pictures / "rows.jsonl", *options, draft=MERGED)
    capsys.readouterr()
    assert run(line) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["outputs_equal"] is True
    assert document["inputs"]["images"]["rounds"] > 0
    assert list(document["serve"]) == ["sglang"]


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        ({"type": "image", "image": "nowhere.png"}, "prompts.jsonl:1: bad image: image 1, 'nowhere.png'"),
        ({"type": "image_url", "image_url": {"url": "no.png"}}, "bad image: image 1, 'no.png'"),
        ({"type": "image", "image": "../out.png"}, "it lies outside data.media_root"),
        ({"type": "image", "image": "rows.jsonl"}, "not an image of one of the formats"),
        ({"type": "image", "image": "https://example.com/a.png"}, "nothing is downloaded"),
        ({"type": "image"}, "has the place of an image, and no image is given"),
        ({"type": "video", "video": "a.mp4"}, "has a part of type 'video'"),
        ({"type": "text", "text": "<|image_pad|>"}, "texts must not hold this token"),
    ],
)
def test_prompts_with_bad_images_are_refused_in_one_line(
    evaluation, pictures, tmp_path, command_line, part, problem
):
    file = tmp_path / "prompts.jsonl"
    content = [part, {"type": "text", "text": "What?"}]
    file.write_text(json.dumps({"messages": [{"role": "user", "content": content}]}) + "\n")
    assert problem in command_line(*evaluation("qwen3_vl", file, f"data.media_root={pictures}")).error


def test_prompts_with_images_need_the_folder_and_an_engine_that_takes_them(
    evaluation, pictures, command_line, monkeypatch
):
    line = evaluation("qwen3_vl", pictures / "rows.jsonl")
    assert "set data.media_root to the folder of the images" in command_line(*line).error
    monkeypatch.setattr(HfEngine, "abilities", replace(HfEngine.abilities, image_prompts=False))
    assert "with engine 'hf', prompts of text alone are answered" in command_line(*line).error
