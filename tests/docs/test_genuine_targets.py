"""The recipes with the genuine config.json, tokenizer and chat template of their targets: ``make test-targets``.

The files are in the folder that SPEC_TEST_TARGETS names, where ``fetch_targets.py`` has written them.
"""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import transformers
import yaml

from spec_core.errors import TargetError
from spec_kit.targets import read_target
from spec_kit.targets.target_types import target_type
from spec_trainer.configuration.chat import PromptConfig
from spec_trainer.configuration.data import DataConfig
from spec_trainer.data.dataset import load_dataset
from spec_trainer.data.prompts import load_prompts

from ..chat_templates import stretches
from .fetch_targets import PUBLISHED, TARGETS
from .recipes import CONFIGS, RECIPES, plan, text_config, write_tensors

FILES = os.environ.get("SPEC_TEST_TARGETS", "")
pytestmark = pytest.mark.skipif(not FILES, reason="needs the files that make test-targets fetches")

CLOCK = {
    "type": "function",
    "function": {
        "name": "clock",
        "description": "Tells the time.",
        "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]},
    },
}
CALL = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": '{"zone": "UTC"}'}}
QUESTION, ANSWER = (
    {"role": "user", "content": "What is two and two?"},
    {"role": "assistant", "content": "Four."},
)
ROWS = [
    {"messages": [{"role": "system", "content": "Be brief."}, QUESTION, ANSWER]},
    {"messages": [QUESTION, ANSWER | {"reasoning_content": "hm"}]},
    {"messages": [QUESTION, ANSWER, {"role": "user", "content": "Sure?"}, ANSWER]},
    {
        "messages": [
            {"role": "user", "content": "The time?"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "12:00", "tool_call_id": "1"},
            {"role": "assistant", "content": "Noon.", "tool_calls": []},
        ],
        "tools": [CLOCK],
    },
]
_QUESTIONS = [["Four.<|im_end|>"], ["Four.<|im_end|>"], ["Four.<|im_end|>", "Four.<|im_end|>"]]
_QWEN_CALL = '<tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call><|im_end|>'
_CHANNEL = "<|channel|>final<|message|>"
SUPERVISED = {
    "qwen3-0.6b-eagle3": [*_QUESTIONS, [_QWEN_CALL, "Noon.<|im_end|>"]],
    "qwen3-8b-dflash-small": [*_QUESTIONS, [_QWEN_CALL, "Noon.<|im_end|>"]],
    "qwen3-8b-fp8-eagle3": [*_QUESTIONS, [_QWEN_CALL, "Noon.<|im_end|>"]],
    "qwen3-235b-a22b-eagle3": [*_QUESTIONS, [_QWEN_CALL, "Noon.<|im_end|>"]],
    "deepseek-v3-eagle3-mla": [
        ["Four.<｜end▁of▁sentence｜>"],
        ["Four.<｜end▁of▁sentence｜>"],
        ["Four.<｜end▁of▁sentence｜>", "Four.<｜end▁of▁sentence｜>"],
    ],
    "gemma-3-12b-eagle3": [
        ["Four.<end_of_turn>"],
        ["Four.<end_of_turn>"],
        ["Four.<end_of_turn>", "Four.<end_of_turn>"],
    ],
    "qwen3-30b-a3b-eagle3": [
        ["Four.<|im_end|>"],
        ["<think>\nhm\n</think>\n\nFour.<|im_end|>"],
        ["Four.<|im_end|>"],  # the recipe takes the last turn only
        ["Noon.<|im_end|>"],
    ],
    "llama-3.1-8b-eagle3": [
        ["Four.<|eot_id|>"],
        ["Four.<|eot_id|>"],
        ["Four.<|eot_id|>", "Four.<|eot_id|>"],
        ['{"name": "clock", "parameters": {"zone": "UTC"}}<|eot_id|>', "Noon.<|eot_id|>"],
    ],
    "gpt-oss-20b-eagle3": [
        [f"{_CHANNEL}Four.<|return|>"],
        [f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{_CHANNEL}Four.<|return|>"],
        [f"{_CHANNEL}Four.<|end|>", f"{_CHANNEL}Four.<|return|>"],
        [
            ' to=functions.clock<|channel|>commentary json<|message|>{"zone": "UTC"}<|call|>',
            f"{_CHANNEL}Noon.<|return|>",
        ],
    ],
}
"""The texts that a draft learns of each row, by recipe. The templates of DeepSeek-V3 and Gemma 3 take no tools."""


@pytest.fixture(params=RECIPES, ids=lambda path: path.stem)
def recipe(request) -> Path:
    return request.param


@pytest.fixture
def values(recipe) -> dict:
    return yaml.safe_load(recipe.read_text())


@pytest.fixture
def rows(recipe) -> list[dict]:
    if recipe.stem not in SUPERVISED:
        pytest.skip("no package holds the target's tokenizer")
    return ROWS[: len(SUPERVISED[recipe.stem])]


@pytest.fixture
def target(values, tmp_path) -> Path:
    folder = tmp_path / "target"
    folder.mkdir()
    held = Path(FILES).absolute() / values["target"]
    for file in held.iterdir() if held.exists() else ():
        (folder / file.name).symlink_to(file)
    config = CONFIGS[values["target"]]
    if not (folder / "config.json").exists():
        (folder / "config.json").write_text(json.dumps(config))
    write_tensors(folder, config)
    return folder


@pytest.fixture
def data(rows, tmp_path) -> Path:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows * 5))
    return file


def read_published(folder: Path, tmp_path: Path):
    """Read a published config.json, beside files of tensors that hold no data."""
    shutil.copytree(folder, tmp_path / "target")
    write_tensors(tmp_path / "target", json.loads((folder / "config.json").read_text()))
    return read_target(tmp_path / "target")


@pytest.mark.parametrize("folder", sorted(Path(FILES).glob(f"{PUBLISHED}/*")), ids=lambda path: path.name)
def test_published_config_of_a_supported_type_is_read(folder, tmp_path) -> None:
    config = json.loads((folder / "config.json").read_text())
    if target_type(config["model_type"]) is None:
        with pytest.raises(TargetError, match="is none of the types"):
            read_published(folder, tmp_path)
        return
    target = read_published(folder, tmp_path)
    text = text_config(config)
    assert (target.hidden_size, target.vocab_size) == (text["hidden_size"], text["vocab_size"])
    assert target.rope["rope_theta"] > 0


def test_the_values_in_these_tests_are_those_of_the_genuine_config(values, target) -> None:
    if values["target"] not in TARGETS or TARGETS[values["target"]][0] is None:
        pytest.skip("no package holds the target's config.json")
    genuine = json.loads((target / "config.json").read_text())
    ours = CONFIGS[values["target"]]
    differ = {key for key in ours if ours[key] != genuine.get(key)}
    assert differ <= {"eos_token_id", "quantization_config"}  # that of the base model; fewer keys
    said_nothing = {"attention_dropout", "initializer_range", "output_router_logits"}
    said_nothing |= {
        "auto_map",
        "aux_loss_alpha",
        "pretraining_tp",
        "router_aux_loss_coef",
        "transformers_version",
    }
    said_nothing |= {"use_cache", "vision_config"} | {key for key in genuine if key.endswith("_token_id")}
    assert set(genuine) - set(ours) <= said_nothing


def test_the_recipe_passes_plan(recipe, values, target, rows, data, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "spec_trainer.plan.memory.free_host_bytes", lambda: 1 << 40
    )  # not this host's business
    planned = plan(recipe, target, data, capsys)
    assert planned["data"].startswith("kept samples: ")
    assert planned["samples"] > len(rows)
    own = json.loads((target / "config.json").read_text()).get("eos_token_id")
    if own == CONFIGS[values["target"]].get("eos_token_id"):  # else the package has that of the base model
        assert [line for line in planned["warnings"] if "answer ends" in line] == []
    assert planned["frozen_tensor_bytes"] == pytest.approx(
        (target / "model.safetensors").stat().st_size, rel=1e-4
    )


@pytest.mark.usefixtures("rows")
def test_the_target_ends_its_turns_with_what_the_engine_stops_at(values, target) -> None:
    eos = CONFIGS[values["target"]]["eos_token_id"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    assert tokenizer.eos_token_id in (eos if isinstance(eos, list) else [eos])


def test_what_is_trained_is_what_the_target_says(recipe, values, target, rows, data) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    keys = {key: value for key, value in values["data"].items() if key != "path"}
    dataset = load_dataset(DataConfig(path=str(data), eval_samples=0, **keys), target, _vocabulary(values))
    for sample, row, expected in zip(dataset.train, rows, SUPERVISED[recipe.stem], strict=False):
        kwargs = keys.get("chat_template_kwargs", {})
        assert sample.input_ids.tolist() == reference(tokenizer, row["messages"], row.get("tools"), kwargs)
        assert turns(tokenizer, sample) == expected


def test_prompts_are_what_the_template_makes_of_them(values, target, rows, data) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    chat = PromptConfig(chat_template_kwargs=values["data"].get("chat_template_kwargs", {}))
    prompts = load_prompts(data, target, _vocabulary(values), 4096, chat)
    for prompt, row in zip(prompts, rows, strict=False):
        messages = row["messages"][:-1]
        kwargs = chat.chat_template_kwargs | {"add_generation_prompt": True}
        assert prompt == reference(tokenizer, messages, row.get("tools"), kwargs)


def _vocabulary(values: dict) -> int:
    return text_config(CONFIGS[values["target"]])["vocab_size"]


def reference(tokenizer, messages: list, tools: list | None, kwargs: dict) -> list[int]:
    """The ids that transformers makes of a conversation, on the day that ours are rendered on."""
    messages = [message | {"content": message["content"] or ""} for message in messages]
    for message in messages:
        if message.pop("tool_calls", []):
            function = CALL["function"] | {"arguments": json.loads(CALL["function"]["arguments"])}
            message["tool_calls"] = [CALL | {"function": function}]
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **kwargs)
    text = re.sub(r"Current date: \d{4}-\d\d-\d\d", "Current date: 2024-07-26", text)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def turns(tokenizer, sample) -> list[str]:
    """The texts of the spans that are supervised."""
    return [tokenizer.decode(ids) for ids in stretches(sample.input_ids, sample.loss_mask)]
