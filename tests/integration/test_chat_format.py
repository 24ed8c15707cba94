"""Thinking on and off, a template of one's own: the same through train, regenerate and evaluate, or refused."""

import json
import shutil
from pathlib import Path

import pytest
import transformers

from spec_trainer.cli.app import run
from spec_trainer.data.prompts import load_prompts

from ..chat_templates import CONVERSATIONS, THINKING, thinking_tokenizer

VOCAB = 300
OFF = "data.chat_template_kwargs.enable_thinking=false"
ON = "data.chat_template_kwargs.enable_thinking=true"
EMPTY = "<think>\n\n</think>\n\n"


@pytest.fixture(scope="module")
def target(make_target, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("thinking") / "target"
    folder.mkdir()
    for file in make_target("llama", vocab_size=VOCAB, eos_token_id=257).iterdir():
        (folder / file.name).symlink_to(file)
    thinking_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = [CONVERSATIONS[index % 2] for index in range(4)]
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("own.jinja").write_text(THINKING.replace("assistant\\n", "assistant:\\n"))
    return tmp_path


def test_plan_shows_the_samples_that_it_was_asked_for(
    target, place, capsys, command_line, monkeypatch
) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    rows = [
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": f"yo {index}"}]}
        for index in range(4)
    ]
    Path("chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plan = ["plan", "--target", str(target), "--data", "chats.jsonl"]
    assert run([*plan, "--show", "2"]) == 0
    out = capsys.readouterr().out
    assert "placement: inline" in out
    assert out.count("[[") == 2
    assert "assistant\n<think>\n\n</think>\n\n[[yo 0<|im_end|>]]\n" in out
    assert run([*plan, "--show", "9", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["shown"]
    assert [text["where"].rpartition(":")[2] for text in shown] == ["1", "2", "3", "4"]
    refused = command_line(*plan, "data.path=prompts.jsonl", "--show", "1")
    assert "spec-trainer regenerate lets the target write them" in refused.error


def test_a_tokenizer_of_another_model_is_warned_of_where_its_tokens_are_valid(target, place, capsys) -> None:
    chat = {"messages": [*CONVERSATIONS[0]["messages"], {"role": "assistant", "content": "Yes."}]}
    Path("chats.jsonl").write_text((json.dumps(chat) + "\n") * 4)
    plan = ["plan", "--data", "chats.jsonl", "--json", "--target"]
    found = {}
    tokens = transformers.AutoTokenizer.from_pretrained(target).convert_ids_to_tokens(range(258))
    for name, ends in (("own", 257), ("other", 7)):
        shutil.copytree(target, name)
        config = json.loads(Path(name, "config.json").read_text()) | {"eos_token_id": ends}
        for file in ("config.json", "generation_config.json"):
            Path(name, file).unlink(missing_ok=True)
        Path(name, "config.json").write_text(json.dumps(config))
        settings = json.loads(Path(name, "tokenizer_config.json").read_text())
        settings["eos_token"] = tokens[ends]
        Path(name, "tokenizer_config.json").write_text(json.dumps(settings))
        assert run([*plan, name]) == 0
        found[name] = [
            line for line in json.loads(capsys.readouterr().out)["warnings"] if "answer ends" in line
        ]
    assert found["own"] == []
    (line,) = found["other"]
    assert "end token of the target (7)" in line


def test_what_is_trained_regenerated_and_evaluated_is_rendered_alike(
    target, place, capsys, command_line
) -> None:
    common = ["--target", str(target)]
    answer = ["regenerate", *common, "--data", "prompts.jsonl", "--max-new-tokens", "4"]
    own = "data.chat_template=own.jinja"
    assert run([*answer, "--output", "off.jsonl", OFF, own]) == 0
    assert "chat_template_kwargs" in command_line(*answer, "--output", "off.jsonl", ON, own).error
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    row = json.loads(Path("off.jsonl").read_text().splitlines()[0])
    asked = [id_ for id_, trained in zip(row["input_ids"], row["loss_mask"], strict=True) if not trained]
    assert tokenizer.decode(asked).endswith("<|im_start|>assistant:\n" + EMPTY)

    train = ["train", *common, "--data", "off.jsonl", "--output", "run", "train.steps=1", "draft.num_steps=2"]
    line = command_line(*train, own).error
    assert (
        "off.jsonl' was made with data.chat_template_kwargs={'enable_thinking': False}, here it is {}" in line
    )
    assert not Path("run").exists()
    assert "off.jsonl' was made with data.chat_template=" in command_line(*train, OFF).error
    shutil.copy("off.jsonl", "alone.jsonl")  # without what says how it was made
    alone = [word.replace("off.jsonl", "alone.jsonl") for word in train]
    assert (
        "alone.jsonl:1: other variables of the template: the row's are {'enable"
        in command_line(*alone, own).error
    )
    assert run([*train, OFF, own, "train.save_every=1"]) == 0

    recorded = {
        "chat_template": Path("own.jinja").read_text(),
        "chat_template_kwargs": {"enable_thinking": False},
    }
    Path("own.jinja").unlink()  # the run has its text
    checkpoint = ["--checkpoint", "run/checkpoints/step-1", "--output", "exported"]
    assert run(["export", *checkpoint]) == 0
    for draft in ("run/draft", "exported"):
        assert json.loads((place / draft / "chat.json").read_text()) == recorded

    measure = [
        "evaluate", *common, "--draft-model", "run/draft", "--max-new-tokens", "2", "--temperature", "0",
    ]  # fmt: skip
    line = command_line(*measure, "--prompts", "prompts.jsonl", ON).error
    assert line.startswith("draft run/draft was made with data.chat_template_kwargs={'enable")
    assert run([*answer, "--output", "on.jsonl", ON]) == 0
    assert "on.jsonl' was made with data." in command_line(*measure, "--prompts", "on.jsonl").error
    capsys.readouterr()
    assert run([*measure, "--no-untrained", "--prompts", "prompts.jsonl", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("word", "problem"),
    [
        ("data.chat_template=missing.jinja", "'missing.jinja' is neither a file nor a Jinja template"),
        ("data.chat_template=prompts.jsonl", "holds no Jinja template"),
        ("data.chat_template_kwargs={tools: []}", "'tools' is no variable of a template's own"),
        ("data.chat_template_kwargs=on", "chat_template_kwargs"),
    ],
)
def test_a_wrong_template_or_variable_is_refused(target, place, command_line, word, problem) -> None:
    words = ["plan", "--target", str(target), "--data", "prompts.jsonl", "--output", "run", word]
    assert problem in command_line(*words).error


def test_a_template_of_ones_own_serves_a_target_without_one(make_target, tmp_path) -> None:
    tokenizer = thinking_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    from spec_trainer.configuration.chat import PromptConfig

    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps(CONVERSATIONS[0]) + "\n")
    (prompt,) = load_prompts(file, tmp_path, VOCAB, 512, PromptConfig(chat_template=THINKING))
    assert tokenizer.decode(prompt).endswith("<|im_start|>assistant\n")
