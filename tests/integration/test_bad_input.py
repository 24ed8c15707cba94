"""Bad input: exit code 2, one line that says what to do, nothing created. Every case is one that people produce."""

import subprocess
import sys
from pathlib import Path

import pytest

from spec_backend_cuda.backend import CudaBackend

from .bad_input import ROW, tree


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("train.lr=.nan", "train.lr=nan: Input should be a finite number"),
        ("data.features=''", "data.features='': String should have at least 1 character"),
        ("train.steps=-1", "train.steps=-1: Input should be greater than 0"),
        ("optimizer.betas=[0.9]", "optimizer.betas.1 is required"),
        ("train.dtype=float16", "train.dtype='float16': Input should be 'float32' or 'bfloat16'"),
        ("steps=5", "unknown section or key 'steps' (did you mean 'train.steps' or 'profile.steps'?)"),
        ("train=null", "train=None: expected a section, with keys such as train.ranks"),
        ("timeouts.step_s=1e12", "step_s=1000000000000.0: Input should be less than or equal to 1000000"),
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
    ],
)
def test_wrong_word(refused, word, line):
    """``unit/trainer/configuration/test_reading.py`` has what is wrong with a word of any section."""
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
        (["data.eval_samples=3", "data.eval_path=x.jsonl"], "both say what is held out; remove one"),
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


@pytest.mark.parametrize("tracker", ["tensorboard=true", "wandb=project"])
def test_tracker_that_is_not_installed(refused, tracker, monkeypatch):
    name = tracker.split("=")[0]
    monkeypatch.setitem(sys.modules, name, None)
    assert refused(f"track.{tracker}") == (
        f"track.{name}: {name} is not installed; pip install {name}, or remove the key"
    )


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
def test_output_is_checked_before_the_data_is_read(refused, file, command):
    damaged = file("rows.jsonl", "no JSON\n")
    line = refused(command=command, data=damaged, output=damaged / "out")
    assert line.endswith(f"{damaged} is not a folder that can be written to")


@pytest.mark.parametrize("command", ["train", "plan", "capture"])
def test_output_whose_name_no_folder_can_have(refused, place, command):
    (place / "circle").symlink_to("circle")
    for name, why in (("x" * 300, "File name too long"), ("circle", "Too many levels of symbolic links")):
        assert f"cannot be created: {why}" in refused(command=command, output=place / name)


def test_init_from_a_folder_that_is_no_draft(refused, peaked_target, place):
    (place / "run").mkdir()
    for folder, what in (
        (peaked_target, "its config.json names the architecture LlamaForCausalLM"),
        (place / "run", "it has no config.json; take the folder draft/ of a run, or what"),
        (place / "nowhere", "there is no such folder; a draft of the hub has to be downloaded first"),
    ):
        line = refused(f"draft.init_from={folder}")
        assert f"draft.init_from={folder} is not an exported eagle3 draft: {what}" in line


def test_export_of_what_is_no_checkpoint(command_line, place, peaked_target):
    before = tree(place)
    for folder in (peaked_target, place / "nowhere"):
        line = command_line("export", "--checkpoint", folder, "--output", place / "draft").error
        assert line == f"{folder} is not a checkpoint: expected a step-N folder with meta.json and state/"
    assert tree(place) == before


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ((), "(tried: dflash, dflash2, dspark, eagle3, lilicorr, mtp, peagle): its config.json"),
        (("--draft-model", "nowhere"), "draft nowhere is not a folder: there is none of that name"),
        (("--draft-model", __file__), "is not a folder: give the folder that holds its config.json"),
        (("--target", "nowhere"), "target nowhere is not a folder"),
        (("--engine", "hff"), "no engine plugin is called 'hff'"),
        (("--temperature", "nan"), "--temperature=nan: expected 0 or more"),
    ],
)
def test_wrong_evaluation(command_line, place, peaked_target, rows_file, words, line):
    """``unit/trainer/measure/evaluation/test_request.py`` has other values that no evaluation takes."""
    flags = {"--target": peaked_target, "--draft-model": peaked_target, "--prompts": rows_file}
    flags |= dict(zip(words[::2], words[1::2], strict=True))
    before = tree(place)
    assert line in command_line("evaluate", *(word for pair in flags.items() for word in pair)).error
    assert tree(place) == before


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
