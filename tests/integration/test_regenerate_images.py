"""``regenerate`` on rows with images: the answers are the target's that sees them, and training takes the rows."""

import json
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image

from spec_engine_hf.engine import HfEngine
from spec_trainer.cli.app import run

from ..image_requests import picture, question
from ..seeing_targets import GEMMA, IMAGE_ID

SIZES = ((20, 12), (33, 47))
OLD = {"role": "assistant", "content": "old"}


def part(name: str) -> dict[str, str]:
    return {"type": "image", "image": name}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def asked(*parts: dict[str, str]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


@pytest.fixture(scope="module")
def media(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("media")
    for name, size in zip(("a.png", "b.png"), SIZES, strict=True):
        (folder / name).write_bytes(picture(size)[0].data)
    rows = [
        {"id": "one", "messages": [asked(part("a.png"), text("What?")), OLD]},
        {"messages": [{"role": "user", "content": "No picture."}, OLD]},
        {"messages": [asked(part("b.png"), text("This?")), OLD, asked(text("And "), part("a.png")), OLD]},
        {"image": ["b.png", "a.png"], "messages": [{"role": "user", "content": "<image>\n<image>\nBoth?"}]},
        {"messages": [question("Here?", [picture(SIZES[0])]), OLD]},
    ]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


@pytest.fixture
def words(seeing_target, media):
    def line(model_type: str, output: Path, *more: str, data: Path | None = None) -> list[str]:
        inputs = ["--target", str(seeing_target(model_type)), "--data", str(data or media / "rows.jsonl")]
        sizes = ["--max-new-tokens", "8", "--temperature", "0"]
        return ["regenerate", *inputs, "--output", str(output), *sizes, f"data.media_root={media}", *more]

    return line


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def opened(reference: str, media: Path) -> Image.Image:
    if reference.startswith("data:"):
        assert reference.endswith(question("", [picture(SIZES[0])])["content"][0]["image_url"]["url"][-40:])
        return picture(SIZES[0])[1]
    return Image.open(BytesIO((media / reference).read_bytes())).convert("RGB")


def preferred(folder: Path, row: dict[str, Any], media: Path) -> list[int]:
    """The token that the whole model of Transformers prefers after each token of a row, which it sees at once."""
    ids = torch.tensor([row["input_ids"]])
    arrays: dict[str, Any] = {}
    if "images" in row:
        processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
        images = [opened(reference, media) for reference in row["images"]]
        arrays = dict(processor(images, return_tensors="pt"))
        arrays.pop("num_soft_tokens_per_image", None)
        arrays["mm_token_type_ids"] = (ids == IMAGE_ID).int()
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(ids, **arrays).logits[0].argmax(dim=-1).tolist()


@pytest.mark.parametrize("model_type", ["qwen3_vl", GEMMA])
def test_answers_are_those_of_the_target_that_sees(words, seeing_target, media, tmp_path, model_type):
    output = tmp_path / "answers.jsonl"
    assert run(words(model_type, output)) == 0
    rows = rows_of(output)
    references = [row.get("images", []) for row in rows]
    assert [len(names) for names in references[:2]] == [1, 0]
    assert references[0] == ["a.png"]
    assert references[2] in (["b.png"], ["b.png", "a.png"])  # the first answer may be cut
    assert references[3] == ["b.png", "a.png"]
    assert references[4][0].startswith("data:image/png;base64,")
    assert rows[0]["id"] == "one"
    for row in rows:
        assert "image" not in row
        assert "old" not in json.dumps(row["messages"])
        places = [place for place, taught in enumerate(row["loss_mask"]) if taught]
        assert places
        ids, best = row["input_ids"], preferred(seeing_target(model_type), row, media)
        assert [best[place - 1] for place in places] == [ids[place] for place in places]
        assert IMAGE_ID not in [ids[place] for place in places]


def test_training_takes_the_answers_and_their_images(words, seeing_target, media, tmp_path, command_line):
    output, target = tmp_path / "answers.jsonl", str(seeing_target(GEMMA))
    assert run(words(GEMMA, output)) == 0
    train = ["--target", target, "--data", str(output), "--output", str(tmp_path / "run"), "train.steps=1"]
    settings = ["draft.num_steps=2", "data.eval_samples=0", f"data.media_root={media}"]
    assert run(["train", *train, *settings]) == 0
    again = tmp_path / "again.jsonl"
    assert run(words(GEMMA, again, data=output)) == 0
    assert [row["input_ids"] for row in rows_of(again)] == [row["input_ids"] for row in rows_of(output)]

    rows = rows_of(output)
    rows[0]["images"] = ["b.png"]
    output.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert "1 image of " in command_line("plan", *train, *settings).error


def test_bad_image_of_a_later_question_is_found_before_the_start(words, tmp_path, command_line):
    data = tmp_path / "rows.jsonl"
    turns = [asked(part("a.png"), text("What?")), OLD, asked(part("no.png")), OLD]
    data.write_text(json.dumps({"messages": turns}) + "\n")
    error = command_line(*words("qwen3_vl", tmp_path / "answers.jsonl", data=data)).error
    assert "rows.jsonl:1: bad image: image 2, 'no.png'" in error


def test_engine_that_takes_no_images_is_refused_in_one_line(words, tmp_path, command_line, monkeypatch):
    monkeypatch.setattr(HfEngine, "abilities", replace(HfEngine.abilities, image_prompts=False))
    error = command_line(*words("qwen3_vl", tmp_path / "answers.jsonl")).error
    assert "with engine 'hf', prompts of text alone are answered" in error
