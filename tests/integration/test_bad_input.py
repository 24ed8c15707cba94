"""Bad input: exit code 2, one line that says what to do, nothing created. Every case is one that people produce."""

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from spec_backend_cuda.backend import CudaBackend

ROW = json.dumps({"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 1]}) + "\n"
CHAT = (
    json.dumps({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]})
    + "\n"
)
TEXT = json.dumps({"text": "hi yo"}) + "\n"


def tree(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The working directory of a command, empty, below a folder for files."""
    folder = tmp_path / "working-directory"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return tmp_path


@pytest.fixture
def refused(place, command_line, peaked_target, rows_file) -> Callable[..., str]:
    """``refused(*words, **flags)``: the one line that a command ends with, nothing created. Without ``target``,
    ``data`` and ``output``, good ones."""

    def call(*words: object, command: str = "train", **flags: object) -> str:
        flags = {"target": peaked_target, "data": rows_file, "output": place / "out"} | flags
        given = [word for key, value in flags.items() for word in (f"--{key}", value) if value is not None]
        before = tree(place)
        line = command_line(command, *given, *words).error
        assert tree(place) == before
        return line

    return call


@pytest.fixture
def file(place) -> Callable[[str, str | bytes], Path]:
    def write(name: str, content: str | bytes) -> Path:
        path = place / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


# --- words and files of configuration ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("train.lrr=1", "unknown key 'train.lrr' (did you mean 'lr'?)"),
        ("train.lr=.nan", "train.lr=nan: Input should be a finite number"),
        ("data.features=", "data.features= is empty; leave the word out, or write null"),
        ("data.features=''", "data.features='': String should have at least 1 character"),
        ("train.steps=true", "train.steps=True: Input should be a valid integer"),
        ("train.steps=-1", "train.steps=-1: Input should be greater than 0"),
        ("optimizer.betas=[0.9]", "optimizer.betas.1 is required"),
        ("train.dtype=float16", "train.dtype='float16': Input should be 'float32' or 'bfloat16'"),
        ("steps=5", "unknown section or key 'steps' (did you mean 'train.steps' or 'profile.steps'?)"),
        ("train=null", "train=None: expected a section, with keys such as train.ranks"),
        (
            "timeouts.step_s=1e12",
            "timeouts.step_s=1000000000000.0: Input should be less than or equal to 1000000",
        ),
        ("engine.send_timeout_s=1e12", "Input should be less than or equal to 1000000"),
        ("output=''", "output: is empty, expected a folder"),
        ("seed=99999999999999999999", "seed=99999999999999999999: expected an integer of 63 bits"),
        ("seed=-1", "seed=-1: Input should be greater than or equal to 0"),
        ("draft=eagle3", "draft='eagle3': expected a section; write draft.name=eagle3"),
        ("engine=null", "engine=None: expected a section; write engine.name=hf"),
        ("draft.name=3", "draft.name=3: expected the name of a draft plugin"),
        ("draft.layers=[3,1]", "draft.layers: [3, 1] must be unique and ascending"),
        ("draft.vocab_size=98", "a draft vocabulary of 98 exceeds the target's 97"),
        ("track.wandb=''", "track.wandb='': String should have at least 1 character"),
        ("target=${HOME}", "${HOME}"),
        ("output=\udcff", "is not Unicode"),
    ],
)
def test_wrong_word(refused, word, line):
    assert line in refused(word)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["trian"], "'trian' is neither a command (train, plan, plugins,"),
        (["train", "quickly"], "'quickly' is neither a command"),
        (["train", "seed=1", "train.lr"], "override 'train.lr' is not of the form section.key=value"),
        (["--lr", "1"], "Unknown option: --lr. See spec-trainer --help"),
        (
            ["quickstart", "train.steps=3"],
            "Unused Tokens: ['train.steps=3']. See spec-trainer quickstart --help",
        ),
        (["--config"], "Parameter --config requires an argument"),
        (["export", "--checkpoint", "x"], 'Command "export" parameter --output requires an argument'),
        (["plan", "--launcher", "slurm"], "no launcher plugin is called 'slurm' (known: local, ray)"),
        (["plan", "--draft", "nothing"], "no draft plugin is called 'nothing'"),
        (["quickstart", "--backend", "nothing"], "no backend plugin is called 'nothing'"),
        (["check", "--backend", "nothing"], "no backend plugin is called 'nothing'"),
        ([], "target is required, such as target=VALUE"),
        (["--target", "here"], "data.path is required, such as data.path=VALUE"),
    ],
)
def test_wrong_command_line(command_line, place, words, line):
    before = tree(place)
    assert line in command_line(*words).error
    assert tree(place) == before


@pytest.mark.parametrize("words", [[], ["train"], ["plan"]])
def test_file_without_its_flag(command_line, file, words):
    path = file("run.yaml", "target: a\n")
    assert command_line(*words, path).error == (
        f"'{path}' is a file: write --config before a configuration, --data before data"
    )


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("train:\n\tlr: 1\n", "is not YAML: while scanning for the next token"),
        (b"target: \xff\xfe\n", "is not YAML: 'utf-8' codec can't decode"),
        ("", "run.yaml: target is required"),
        ("target: ???\ndata: {path: x}\n", "target"),
        (
            "target: a\ndata: rows.jsonl\n",
            "data='rows.jsonl': expected a section, with keys such as data.path",
        ),
        ("target: a\ndata: {path: x}\ntrain: {steps: ten}\n", "run.yaml: train.steps='ten': Input should be"),
    ],
)
def test_wrong_config_file(command_line, place, file, content, line):
    path = file("run.yaml", content)
    before = tree(place)
    assert line in command_line("--config", path).error
    assert tree(place) == before


# --- combinations -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["placement.trainer_fraction=0.5"], "remove it or set placement.kind=colocated"),
        (["train.decay_share=0.5"], "remove it or set train.schedule=wsd"),
        (["train.schedule=constant", "train.min_lr_ratio=0.1"], "remove it or set another schedule"),
        (
            ["data.eval_samples=0", "train.eval_every=5"],
            "set data.eval_path or data.eval_samples, or remove it",
        ),
        (["data.eval_samples=40"], "leaves nothing of 40 samples to train on"),
        (["data.eval_samples=3", "data.eval_path=x.jsonl"], "remove one of them"),
        (["placement.window_bytes=1000"], "raise it to"),
        (["engine.batch_tokens=5"], "or lower data.max_length"),
        (["train.push_every=5"], "set push.to=[http://127.0.0.1:8000] or where yours is, or remove it"),
        (
            ["train.push_every=5", "push.to=[a:1]"],
            "'a:1' is no address of a server; expected http://host:port",
        ),
        (["push.canary_rounds=5"], "nothing is reverted; set push.canary_margin or remove it"),
    ],
)
def test_illegal_combination_names_the_remedy(refused, words, remedy):
    """``unit/trainer/plan/test_combinations.py`` has the others."""
    line = refused(*words)
    assert remedy in line
    assert words[-1].split("=")[0].split(".")[1] in line
    assert line.count("configuration: ") <= 1


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["push.address=here"], "servers cannot connect to 'here': 'here' is not host:port"),
        (["push.address=127.0.0.1:70000"], "the highest port is 65535"),
        (["push.transport=[pigeon]"], "no weight_transport plugin is called 'pigeon'"),
        (["push.transport=[ipc]", "push.folder=x"], "no weight transport among ipc has the option folder"),
        (["push.options.file.kep=5"], "unknown key 'push.options.file.kep' (did you mean 'keep'?)"),
        (["push.options.file.keep=many"], "push.options.file.keep='many': Input should be a valid integer"),
        (["push.options.fil.keep=5"], "no weight_transport plugin is called 'fil' (did you mean 'file'?)"),
        (["push.options.file=5"], "push.options.file=5"),
        (
            ["push.options.file.keep=5", "push.transport=[ipc]"],
            "weight transport 'file' has options, but only ipc may be used; remove its options, or name it too",
        ),
        (["push.bucket_bytes=1"], "push.bucket_bytes=1: Input should be greater than or equal to 4096"),
        ([], "environment variable SPEC_DRAFT_TOKEN is not set"),
    ],
)
def test_a_plan_of_pushes_that_cannot_work_is_refused(refused, words, line, monkeypatch):
    monkeypatch.delenv("SPEC_DRAFT_TOKEN", raising=False)
    assert line in refused("train.push_every=5", "push.to=[http://127.0.0.1:1]", *words, command="plan")


def test_a_plan_of_pushes_with_a_secret_or_folder_of_no_use_is_refused(refused, tmp_path, monkeypatch):
    pushes = ["train.push_every=5", "push.to=[http://127.0.0.1:1]"]
    monkeypatch.setenv("SPEC_DRAFT_TOKEN", "two\nlines")
    assert refused(*pushes, command="plan").endswith("without spaces at its ends (SPEC_DRAFT_TOKEN)")
    taken = tmp_path / "file"
    taken.touch()
    for key in ("push.folder", "push.options.file.folder"):
        line = refused(*pushes, f"{key}={taken}/versions", command="plan")
        assert line.startswith(f"folder for weights {taken}/versions: {taken} is not a folder")


@pytest.mark.parametrize("command", ["plan", "train"])
def test_a_port_that_another_program_uses(refused, monkeypatch, command):
    monkeypatch.setenv("SPEC_DRAFT_TOKEN", "x" * 40)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refused(
            "train.push_every=5", "push.to=[http://127.0.0.1:1]", f"push.address=127.0.0.1:{port}",
            command=command,
        )  # fmt: skip
    assert f"127.0.0.1:{port}" in line
    assert "in use" in line


@pytest.mark.parametrize("tracker", ["tensorboard=true", "wandb=project"])
def test_tracker_that_is_not_installed(refused, tracker, monkeypatch):
    name = tracker.split("=")[0]
    monkeypatch.setitem(sys.modules, name, None)
    assert refused(f"track.{tracker}") == (
        f"track.{name}: {name} is not installed; pip install {name}, or remove the key"
    )


@pytest.mark.parametrize(
    ("kind", "name", "hint"),
    [
        ("backend", "cpuu", "did you mean 'cpu'"),
        ("backend", "metal", "installed: ascend, cpu, cuda"),
        ("draft", "eagle4", "did you mean 'eagle3'"),
        ("engine", "hff", "did you mean 'hf'"),
        ("strategy", "ddp", "installed: fsdp"),
    ],
)
def test_unknown_plugin(refused, kind, name, hint):
    line = refused(**{kind: name})
    assert line.startswith(f"no {kind} plugin is called '{name}'")
    assert hint in line


# --- data -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "where", "why"),
    [
        (ROW + "{oops\n", ":2: ", "not JSON"),
        (
            ROW + '{"input_ids": [1, 97], "loss_mask": [1, 1]}\n',
            ":2: ",
            "vocabulary: id 97, the target's vocabulary",
        ),
        (f"[{ROW}]", ":1: ", "a file of one JSON array is named .json"),
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


@pytest.mark.parametrize("flag", ["data", "eval"])
def test_missing_data(refused, place, flag):
    missing = place / "nowhere.jsonl"
    line = refused(data=missing) if flag == "data" else refused(f"data.eval_path={missing}")
    assert f"data '{missing}' does not exist" in line


@pytest.mark.parametrize("key", ["path", "eval_path"])
def test_empty_data_is_not_the_working_directory(refused, place, key):
    """``--data "$DATA"`` where the variable is not set."""
    (place / "working-directory" / "rows.jsonl").write_text(ROW)
    assert "data is empty: expected a .jsonl" in refused(f"data.{key}=''")


def test_a_file_with_the_line_ends_of_windows_is_read(command_line, place, peaked_target, rows_file, file):
    path = file("rows.jsonl", rows_file.read_bytes().replace(b"\n", b"\r\n"))
    outcome = command_line("plan", "--target", peaked_target, "--data", path)
    assert outcome.code == 0, outcome.err


def test_data_of_no_known_kind(refused, file):
    line = refused(data=file("rows.csv", "a,b\n"))
    assert "is of no known kind: expected a .jsonl, .json, .parquet file" in line
    assert line.endswith("a .jsonl file has an object in each line, a file of one JSON array is named .json")


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


def test_data_folder_without_data_files(refused, place):
    assert "holds no .jsonl, .json, .parquet file" in refused(data=place / "working-directory")


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


@pytest.mark.parametrize("command", ["plan", "train"])
def test_target_that_the_installed_transformers_does_not_know(refused, place, peaked_target, command):
    new = shutil.copytree(peaked_target, place / "target")
    config = json.loads((new / "config.json").read_text())
    (new / "config.json").write_text(json.dumps(config | {"model_type": "kimi_k2"}))
    line = refused(command=command, target=new)
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


@pytest.mark.parametrize("command", ["plan", "train"])
@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ([], "the target's weights in 1 engine (4096.0 GiB): choose a smaller target (target)"),
        (
            ["engine.replicas=2", "placement.kind=disaggregated"],
            "the target's weights in 2 engines (8192.0 GiB): lower engine.replicas",
        ),
    ],
)
def test_target_larger_than_the_memory(refused_vast, command, words, remedy):
    line = refused_vast(command, *words)
    assert line.startswith("this host's memory does not hold the run: it takes ")
    assert line.endswith(remedy)


@pytest.mark.parametrize("command", ["plan", "train"])
@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["placement.window_bytes=400000000"], "lower placement.window_bytes"),
        (["placement.window_bytes=100000"], "lower engine.replicas or train.ranks"),
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


@pytest.mark.parametrize("command", ["plan", "train"])
def test_disk_too_small_for_the_checkpoints(refused, monkeypatch, command):
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    line = refused("train.steps=30", "train.save_every=5", "train.keep=4", command=command)
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


# --- output and artifacts ---------------------------------------------------------------------------------------


def test_output_of_another_run(refused, place):
    (place / "out").mkdir()
    (place / "out" / ".identity").write_text("of another\n")
    assert "belongs to another run" in refused()
    assert "belongs to another run" in refused(command="plan")


def test_output_that_is_a_file_or_below_one(refused, file):
    path = file("notes", "x")
    assert refused(output=path) == f"output {path} is a file; give a directory"
    assert f"{path} is not a folder that can be written to" in refused(output=path / "run")


@pytest.mark.parametrize("command", ["train", "plan", "capture"])
def test_output_that_cannot_be_written_to(refused, place, monkeypatch, command):
    """The operating system says so: root, who may run this, can write to any folder."""
    folder = place / "locked"
    folder.mkdir()
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != folder)
    line = refused(command=command, output=folder)
    assert line == f"output {folder}: {folder} is not a folder that can be written to"


@pytest.mark.parametrize("command", ["train", "plan", "capture"])
def test_output_whose_name_no_folder_can_have(refused, place, command):
    (place / "circle").symlink_to("circle")
    for name, why in (("x" * 300, "File name too long"), ("circle", "Too many levels of symbolic links")):
        assert f"cannot be created: {why}" in refused(command=command, output=place / name)


def test_init_from_a_folder_that_is_no_draft(refused, peaked_target, place):
    for folder in (peaked_target, place / "nowhere"):
        assert f"draft.init_from={folder} is not an exported eagle3 draft" in refused(
            f"draft.init_from={folder}"
        )


def test_export_of_what_is_no_checkpoint(command_line, place, peaked_target):
    before = tree(place)
    for folder in (peaked_target, place / "nowhere"):
        line = command_line("export", "--checkpoint", folder, "--output", place / "draft").error
        assert line == f"{folder} is not a checkpoint: expected a step-N folder with meta.json and state/"
    assert tree(place) == before


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            (),
            "(tried: dflash, dflash2, dspark, eagle3, mtp, peagle): its config.json",
        ),
        (("--draft-model", "nowhere"), "draft nowhere is not a folder"),
        (("--target", "nowhere"), "target nowhere is not a folder"),
        (("--engine", "hff"), "no engine plugin is called 'hff'"),
        (("--num-draft-tokens", "0"), "--num-draft-tokens=0: expected 1 or more"),
        (("--num-draft-tokens", "two"), 'unable to convert "two" into int'),
        (("--temperature", "nan"), "--temperature=nan: expected 0 or more"),
        (("--max-new-tokens", "-3"), "--max-new-tokens=-3: expected 1 or more"),
        (
            ("--concurrency", "1,many"),
            "--concurrency=1,many: expected positive integers below 100000, such as",
        ),
        (("--concurrency", "9" * 5_000), ": expected positive integers below 100000, such as 1,8,32"),
        (("--seed", "9" * 21), "--seed=999999999999999999999: expected an integer of at most 64 bits"),
    ],
)
def test_wrong_evaluation(command_line, place, peaked_target, rows_file, words, line):
    flags = {"--target": peaked_target, "--draft-model": peaked_target, "--prompts": rows_file}
    flags |= dict(zip(words[::2], words[1::2], strict=True))
    before = tree(place)
    assert line in command_line("evaluate", *(word for pair in flags.items() for word in pair)).error
    assert tree(place) == before


# --- the real program ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["bad row", "nothing"])
def test_real_program(place, file, peaked_target, rows_file, case):
    """Nothing but the line reaches stderr: no log, no warning, no progress bar of a library."""
    good = ["--target", peaked_target, "--data", rows_file, "--output", place / "out"]
    words, line = {
        "bad row": ([*good, f"data.path={file('rows.jsonl', ROW + '{')}"], ":2: not JSON"),
        "nothing": ([], "target is required"),
    }[case]
    before = tree(place)
    program = Path(sys.executable).with_name("spec-trainer")
    child = subprocess.run(
        [program, *map(str, words)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (child.returncode, child.stdout, child.stderr.count("\n")) == (2, "", 1), child.stderr
    assert line in child.stderr
    assert tree(place) == before


@pytest.mark.skipif(CudaBackend.probe().ok, reason="this machine has a GPU")
@pytest.mark.parametrize("command", ["plan", "train"])
def test_without_a_gpu_the_line_says_what_is_missing(refused, command):
    line = refused(command=command, backend="cuda")
    assert line.startswith("backend 'cuda'")
    assert "cannot run here: " in line
    assert "install" in line or "CUDA_VISIBLE_DEVICES" in line
