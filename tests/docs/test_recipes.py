"""Each recipe of examples/ is short, and passes ``plan`` against the values of its target's own config.json."""

import json
import re
import shlex
import shutil
from types import SimpleNamespace

import pytest
import yaml
from PIL import Image

from spec_trainer.cli import app as cli

from ..chat_templates import CONVERSATIONS, byte_tokenizer, thinking_tokenizer
from ..seeing_targets import IMAGE, IMAGE_ID, SPECIALS, TEMPLATE, VIDEO
from .recipes import CONFIGS, EXAMPLES, RECIPES, plan, write_tensors


def test_every_target_has_a_recipe() -> None:
    assert {yaml.safe_load(recipe.read_text())["target"] for recipe in RECIPES} == set(CONFIGS)


@pytest.fixture(autouse=True)
def large_host(monkeypatch) -> None:
    """Here the drafts of many GPUs are planned for one CPU, whose memory and disk may be less."""
    monkeypatch.setattr("spec_trainer.plan.memory.free_host_bytes", lambda: 1 << 40)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 40))


def conversations(file):
    """Write fifty conversations that end with an answer, and return the file."""
    rows = [
        row | {"messages": [*row["messages"], {"role": "assistant", "content": f"It is {number}."}]}
        for number in range(10)
        for row in CONVERSATIONS
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_short_and_passes_plan(recipe, tmp_path, monkeypatch, capsys) -> None:
    text = recipe.read_text()
    assert len(text.splitlines()) <= 25
    assert all(word in text for word in ("xpected", "Data:", "GPU", "our", "Not run by us"))
    monkeypatch.chdir(tmp_path)
    config = CONFIGS[yaml.safe_load(text)["target"]]
    target = tmp_path / "target"
    target.mkdir()
    here = {"model_type": "deepseek_v3"} if config["model_type"] == "kimi_k2" else {}  # transformers lacks it
    (target / "config.json").write_text(json.dumps(config | here))
    write_tensors(target, config)
    thinking_tokenizer().save_pretrained(target)
    data = conversations(tmp_path / "rows.jsonl")
    planned = plan(recipe, target, data, capsys)
    assert planned["architecture"] == config["architectures"][0]
    assert planned["samples"] > 0


@pytest.mark.parametrize("recipe", sorted(EXAMPLES.glob("smollm2-*.yaml")), ids=lambda path: path.stem)
def test_a_recipe_of_the_small_target_passes_plan(recipe, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    config = CONFIGS["meta-llama/Llama-3.1-8B-Instruct"] | {
        "eos_token_id": 2, "hidden_size": 576, "intermediate_size": 1536, "max_position_embeddings": 8192,
        "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3, "rope_scaling": None,
        "rope_theta": 100000.0, "tie_word_embeddings": True, "vocab_size": 49152,
    }  # fmt: skip
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config))
    write_tensors(target, config)
    thinking_tokenizer().save_pretrained(target)
    conversations(tmp_path / "held-out.jsonl")
    planned = plan(recipe, target, conversations(tmp_path / "rows.jsonl"), capsys)
    assert planned["steps"] == yaml.safe_load(recipe.read_text())["train"]["steps"]


def test_the_recipe_for_qwen3_vl_takes_rows_as_llava_publishes_them(tmp_path, monkeypatch, capsys) -> None:
    """The row is that of docs/targets.md; the target has the sizes of Qwen3-VL's own image processor."""
    page = (EXAMPLES.parent / "docs/targets.md").read_text()
    (row,) = json.loads(re.search(r"```json\n(\[.*?\])\n```", page, re.DOTALL)[1])
    picture = tmp_path / "pictures" / row["image"]
    picture.parent.mkdir(parents=True)
    Image.new("RGB", (1280, 960), "red").save(picture)
    question, answer = (turn["value"] for turn in row["conversations"])
    rows = [
        row | {"conversations": [row["conversations"][0], {"from": "gpt", "value": f"{answer} {number}"}]}
        for number in range(10, 40)
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    target = tmp_path / "target"
    target.mkdir()
    config = CONFIGS["Qwen/Qwen3-VL-8B-Instruct"] | {"image_token_id": IMAGE_ID}
    (target / "config.json").write_text(json.dumps(config))
    write_tensors(target, config)
    byte_tokenizer((*SPECIALS, IMAGE, VIDEO), TEMPLATE, "<|im_end|>").save_pretrained(target)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2,
        "size": {"shortest_edge": 65536, "longest_edge": 16777216},
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    }  # fmt: skip
    (target / "preprocessor_config.json").write_text(json.dumps(processor))
    monkeypatch.chdir(tmp_path)
    recipe = EXAMPLES / "qwen3-vl-8b-eagle3.yaml"
    planned = plan(recipe, target, tmp_path / "rows.json", capsys)
    assert planned["samples"] == 27
    text = (
        "<|im_start|>user\n<|vision_start|><|vision_end|>{}<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n"
    )
    filled = text.format(question.removeprefix("<image>\n"), f"{answer} 10")
    tokens = byte_tokenizer((*SPECIALS, IMAGE, VIDEO), TEMPLATE, "<|im_end|>")(filled)
    assert planned["tokens_per_epoch"] == 27 * (len(tokens["input_ids"]) + 1200)


@pytest.fixture(scope="module")
def small_target(make_target, tmp_path_factory):
    """A target that answers here, with a tokenizer and a template."""
    folder = tmp_path_factory.mktemp("small") / "target"
    folder.mkdir()
    for file in make_target("llama", vocab_size=32000, eos_token_id=257).iterdir():
        (folder / file.name).symlink_to(file)
    thinking_tokenizer().save_pretrained(folder)
    return folder


def regenerate_command(recipe) -> list[str]:
    """Words of the command in a recipe's comments that makes its data, or none."""
    text = re.sub(r"\\\n#\s*", "", recipe.read_text())
    found = re.search(r"^#   spec-trainer (regenerate .*)$", text, re.MULTILINE)
    return shlex.split(found[1]) if found else []


@pytest.mark.parametrize(
    "recipe", [path for path in RECIPES if regenerate_command(path)], ids=lambda path: path.stem
)
def test_the_command_that_makes_the_data_makes_what_the_recipe_takes(
    recipe, small_target, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    values, words = yaml.safe_load(recipe.read_text()), regenerate_command(recipe)
    assert words[words.index("--target") + 1] == values["target"]
    assert words[words.index("--output") + 1] == values["data"]["path"]
    prompts = tmp_path / words[words.index("--data") + 1]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in CONVERSATIONS * 2))
    here = {"--target": str(small_target), "--engine": "hf", "--backend": "cpu", "--max-new-tokens": "3"}
    words = [here.get(before, word) for before, word in zip(["", *words], words, strict=False)]
    missing = [word for key, value in here.items() if key not in words for word in (key, value)]
    assert cli.run([*words, *missing]) == 0, capsys.readouterr().err
    capsys.readouterr()
    assert plan(recipe, small_target, tmp_path / values["data"]["path"], capsys)["samples"] > 0
