"""Bad data and targets: exit code 2, one line that says what to do, nothing created."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from .bad_input import CHAT, ROW, TEXT

# --- data -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "where", "why"),
    [
        (
            ROW + '{"input_ids": [1, 97], "loss_mask": [1, 1]}\n',
            ":2: ",
            "vocabulary: id 97, the target's vocabulary",
        ),
        ("[\n" + ROW + "]\n", ":1: ", "a file of one JSON array is named .json"),
        (
            "prompt,answer\nhi,yo\n",
            ":1: ",
            "not JSON: Expecting value at column 1; a .jsonl file has an object",
        ),
        (
            '{"chat": [{"role": "user"}]}\n',
            ":1: ",
            "got chat; 'chat' looks like a conversation: rename it to mess",
        ),
    ],
)
def test_wrong_rows(refused, file, content, where, why):
    path = file("rows.jsonl", content)
    line = refused(data=path)
    assert f"{path}{where}" in line
    assert why in line


def test_missing_data(refused, place):
    """``unit/trainer/data/test_sources.py`` has the other paths without data."""
    missing = place / "nowhere.jsonl"
    assert f"data '{missing}' does not exist" in refused(f"data.eval_path={missing}")


@pytest.mark.parametrize("key", ["path", "eval_path"])
def test_empty_data_is_not_the_working_directory(refused, place, key):
    """``--data "$DATA"`` where the variable is not set."""
    (place / "working-directory" / "rows.jsonl").write_text(ROW)
    assert "data is empty: expected a .jsonl" in refused(f"data.{key}=''")


def test_a_file_with_the_line_ends_of_windows_is_read(command_line, place, peaked_target, rows_file, file):
    path = file("rows.jsonl", rows_file.read_bytes().replace(b"\n", b"\r\n"))
    outcome = command_line("plan", "--target", peaked_target, "--data", path)
    assert outcome.code == 0, outcome.err


def test_tokenizer_of_another_model(refused, place, file, peaked_target, add_characters):
    target = shutil.copytree(peaked_target, place / "target")
    add_characters(target)
    tokenizer = json.loads((target / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = {text: 150 + number for text, number in tokenizer["model"]["vocab"].items()}
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    line = refused(command="plan", target=target, data=file("rows.jsonl", TEXT))
    assert "the target's vocabulary has 97" in line
    assert f"the tokenizer in '{target}' may be another model's" in line


def test_data_without_answers(refused, place, file, peaked_target, add_characters):
    target = shutil.copytree(peaked_target, place / "target")
    add_characters(target)
    questions = json.dumps({"messages": [{"role": "user", "content": "hi"}]}) + "\n"
    line = refused(command="plan", target=target, data=file("rows.jsonl", 20 * questions))
    assert line.endswith(
        "it needs answers, such as assistant turns: spec-trainer regenerate lets the target write them"
    )


def test_a_few_hundred_chats_with_the_defaults_are_warned_of(command_line, place, peaked_target, file):
    """The words of the warning make a run of enough steps."""
    rows = file(
        "rows.jsonl", "".join(ROW.replace("5, 6", f"{5 + i % 80}, {6 + i // 80}") for i in range(300))
    )
    given = ["--target", peaked_target, "--data", rows, "--output", place / "out"]
    few = command_line("plan", *given)
    assert (few.code, few.out.count("are advised; add train.epochs=100,")) == (0, 1)
    enough = command_line("plan", *given, "train.epochs=100")
    assert "are advised" not in enough.out


# --- targets ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "config", "why"),
    [
        ("llama", {"num_hidden_layers": 4}, "it has 4 layers, at least 7 are needed"),
        ("gpt2", {}, "its final norm is a layer norm, an RMS norm is needed"),
    ],
)
def test_target_that_the_draft_cannot_express(refused, make_target, shape, config, why):
    assert why in refused(target=make_target(shape, **config))


def test_target_that_is_no_folder(refused, place, rows_file):
    assert "is not a folder" in refused(target=place / "nowhere")
    assert "is not a folder" in refused(target=rows_file)
    assert "has no config.json; a target is the folder of a model" in refused(target=place)


def test_a_draft_given_as_the_target(refused, command_line, place, peaked_target, rows_file):
    run = place / "run"
    given = ("--target", peaked_target, "--data", rows_file, "--output", run, "train.steps=1")
    assert command_line("train", *given).code == 0
    assert "an exported draft has none: give the model that it drafts for" in refused(target=run / "draft")
    assert "has no config.json; a target is the folder of a model" in refused(target=run)
    line = command_line("export", "--checkpoint", run, "--output", place / "draft").error
    assert line.endswith(f"; those of this run are in {run / 'checkpoints'}")


def test_target_that_the_installed_transformers_does_not_know(refused, place, peaked_target):
    new = shutil.copytree(peaked_target, place / "target")
    config = json.loads((new / "config.json").read_text())
    (new / "config.json").write_text(json.dumps(config | {"model_type": "kimi_k2"}))
    line = refused(command="plan", target=new)
    assert "does not know model_type='kimi_k2'; pip install --upgrade transformers" in line


def test_target_that_the_hub_does_not_have(refused):
    assert "is neither a folder nor a model that the hub gives" in refused(target="nobody/nothing")


def test_damaged_target(refused, place, peaked_target):
    damaged = shutil.copytree(peaked_target, place / "target")
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert "is not a safetensors file, or was cut short" in refused(target=damaged)
    (damaged / "config.json").write_text("{")
    assert "config.json is not JSON" in refused(target=damaged)


def test_target_that_the_engine_cannot_load_leaves_nothing(refused, place, peaked_target):
    """Found only when the engine starts, in the run's directory."""
    strange = shutil.copytree(peaked_target, place / "target")
    config = json.loads((strange / "config.json").read_text())
    (strange / "config.json").write_text(json.dumps(config | {"initializer_range": "wide"}))
    assert "transformers cannot load target" in refused(target=strange)


# --- memory and disk --------------------------------------------------------------------------------------------

VAST = 1 << 42


@pytest.fixture
def vast_target(place, peaked_target) -> Path:
    """A target of 4 TiB: its file has a hole where the weights of its experts would be."""
    folder = shutil.copytree(peaked_target, place / "vast")
    file = folder / "model.safetensors"
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header, weights = json.loads(content[8 : 8 + size]), content[8 + size :]
    header["model.layers.7.mlp.experts.gate"] = {
        "dtype": "U8", "shape": [VAST], "data_offsets": [len(weights), len(weights) + VAST]
    }  # fmt: skip
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + weights)
    with file.open("r+b") as stream:
        stream.truncate(8 + len(text) + len(weights) + VAST)
    return folder


@pytest.fixture
def refused_vast(command_line, place, rows_file, vast_target) -> Callable[..., str]:
    """As ``refused``, which would read all of the file."""

    def call(command: str, *words: str) -> str:
        given = ["--target", vast_target, "--data", rows_file, "--output", place / "out"]
        return command_line(command, *given, *words).error

    return call


@pytest.mark.parametrize(
    ("command", "words", "remedy"),
    [
        ("plan", [], "the target's weights in 1 engine (4096.0 GiB): choose a smaller target (target)"),
        (
            "train",
            ["engine.replicas=2", "placement.kind=disaggregated"],
            "the target's weights in 2 engines (8192.0 GiB): lower engine.replicas",
        ),
    ],
)
def test_target_larger_than_the_memory(refused_vast, command, words, remedy):
    line = refused_vast(command, *words)
    assert line.startswith("this host's memory does not hold the run: it takes ")
    assert line.endswith(remedy)


@pytest.mark.parametrize(
    ("command", "words", "remedy"),
    [
        ("plan", ["placement.window_bytes=400000000"], "lower placement.window_bytes"),
        ("train", ["placement.window_bytes=100000"], "lower engine.replicas or train.ranks"),
    ],
)
def test_the_biggest_part_is_named_with_its_key(refused, monkeypatch, command, words, remedy, file):
    """All features together are 280 MiB, the libraries of a process 200."""
    row = json.dumps({"input_ids": [5] * 128, "loss_mask": [1] * 128}) + "\n"
    rows = file("many.jsonl", row * 4_500)
    memory = psutil.virtual_memory()._replace(available=100 << 20)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    line = refused(*words, "data.eval_samples=0", command=command, data=rows)
    assert "this host's memory does not hold the run" in line
    assert "100.0 MiB are free" in line
    assert line.endswith(remedy)


def test_disk_too_small_for_the_checkpoints(refused, monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    line = refused("train.steps=30", "train.save_every=5", "train.keep=4")
    assert line.startswith("the disk of output ")
    assert "the biggest part is 5 checkpoints" in line
    assert line.endswith("lower train.keep, or set output to a folder with more room")


@pytest.mark.parametrize("rows", [CHAT, TEXT])
def test_target_without_tokenizer_for_data_that_needs_one(refused, file, peaked_target, rows):
    assert f"the tokenizer in '{peaked_target}' cannot be read" in refused(data=file("rows.jsonl", rows))


def test_tokenizer_without_chat_template_for_conversations(refused, place, file, peaked_target):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    target = shutil.copytree(peaked_target, place / "target")
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "hi": 5, "yo": 6}, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(target)
    assert "has no chat template, which conversations need" in refused(
        target=target, data=file("rows.jsonl", CHAT)
    )
