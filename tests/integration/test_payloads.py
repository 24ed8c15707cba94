"""No data is code: whatever a folder or file holds, no command runs it. Each payload would make a file."""

import io
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from spec_trainer.cli.app import run

from ..chat_templates import byte_tokenizer
from .traps import Traps

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
KEYS = {"train.global_batch_tokens": 64, "draft.num_steps": 2, "train.save_every": 1}


class Payload:
    """A pickle that makes the file when it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@pytest.fixture(scope="module")
def good_target(make_target: Callable[..., Path]) -> Path:
    """A tiny Llama that speaks bytes."""
    folder = make_target("llama", vocab_size=256, eos_token_id=255)
    byte_tokenizer((), TEMPLATE).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations, so that every command loads the tokenizer and renders the template."""
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "good day"}]
    file = tmp_path_factory.mktemp("data") / "chats.jsonl"
    file.write_text((json.dumps({"messages": turns}) + "\n") * 4)
    return file


def train_words(target: Path, data: Path, output: Path, *more: str) -> list[str]:
    keys = [f"{key}={value}" for key, value in KEYS.items()]
    return [
        "--target",
        str(target),
        "--data",
        str(data),
        "--output",
        str(output),
        *keys,
        "train.steps=2",
        *more,
    ]


@pytest.fixture(scope="module")
def trained(good_target: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("trained") / "run"
    assert run(train_words(good_target, data, output)) == 0
    return output


@pytest.fixture
def target(good_target: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return shutil.copytree(good_target, tmp_path / "target")


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that payloads make. Somebody answers yes to every question."""
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 100))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "marker"


def python_that_touches(marker: Path) -> str:
    return f"open({str(marker)!r}, 'w').close()\n"


def edit(file: Path, **fields: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


# --- targets ----------------------------------------------------------------------------------------------------


def with_code(target: Path, marker: Path, model_type: str) -> None:
    """The target's own classes, as the hub has them."""
    classes = "class C:\n    pass\nEvilConfig = EvilModel = EvilTokenizer = C\n"
    (target / "evil.py").write_text(python_that_touches(marker) + classes)
    auto = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilModel"}
    edit(target / "config.json", auto_map=auto, model_type=model_type)
    tokenizer = {"AutoTokenizer": ["evil.EvilTokenizer", "evil.EvilTokenizer"]}
    edit(target / "tokenizer_config.json", auto_map=tokenizer, tokenizer_class="EvilTokenizer")


def with_pickled_weights(target: Path, marker: Path) -> None:
    (target / "model.safetensors").unlink()
    (target / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(marker)))


def with_a_template_that_reaches_out(target: Path, marker: Path) -> None:
    reach = f"{{{{ cycler.__init__.__globals__.os.system('touch {marker}') }}}}"
    (target / "chat_template.jinja").write_text(TEMPLATE + reach)


TARGETS = {
    "code of an unknown type": (
        lambda target, marker: with_code(target, marker, "evil"),
        "model_type='evil'",
    ),
    "code of a known type": (lambda target, marker: with_code(target, marker, "llama"), "custom code"),
    "pickled weights": (with_pickled_weights, "save the target as safetensors first"),
    "template": (with_a_template_that_reaches_out, "refused by the chat template: SecurityError"),
}
"""Payloads, each with a part of the line that refuses it."""


@pytest.mark.parametrize(("spoil", "refusal"), TARGETS.values(), ids=TARGETS)
def test_a_target_runs_nothing(command_line, target, data, trained, marker, spoil, refusal):
    spoil(target, marker)
    words = train_words(target, data, marker.with_name("out"))
    inputs = ("--target", target, "--data", data)
    draft = ("--draft-model", trained / "draft", "--prompts", data)
    few = ("--max-new-tokens", 2)
    for outcome in (
        command_line("plan", *words),
        command_line("train", *words),
        command_line("capture", *inputs, "--output", marker.with_name("features")),
        command_line("regenerate", *inputs, "--output", marker.with_name("answers.jsonl"), *few),
        command_line("evaluate", "--target", target, *draft, *few),
    ):
        assert refusal in outcome.error
    assert not marker.exists()


# --- checkpoints, drafts, features ------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["beside", "instead"])
def test_a_checkpoint_runs_nothing(command_line, good_target, data, trained, marker, place):
    output = shutil.copytree(trained, marker.with_name("run"), symlinks=True)
    checkpoint = output / "checkpoints" / "step-2"
    payload = pickle.dumps(Payload(marker))
    for name in ("state/.metadata", "state/__0_0.distcp", "generator-0.pt", "state/rank-1.safetensors"):
        (checkpoint / name).write_bytes(payload)
    if place == "instead":
        (checkpoint / "state" / "index.json").unlink()
        meta = json.loads((checkpoint / "meta.json").read_text())
        (checkpoint / "meta.json").write_text(json.dumps({**meta, "files": {}}))
    exported = command_line("export", "--checkpoint", checkpoint, "--output", marker.with_name("draft"))
    resumed = command_line(*train_words(good_target, data, output, "train.steps=3"))
    assert (exported.code, resumed.code) == (2, 2)
    assert not marker.exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors", "config.json"])
def test_a_draft_runs_nothing(command_line, good_target, data, trained, marker, name):
    draft = shutil.copytree(trained / "draft", marker.with_name("draft"))
    (draft / name).write_bytes(pickle.dumps(Payload(marker)))
    if name == "pytorch_model.bin":
        (draft / "model.safetensors").unlink()
    asked = ("--target", good_target, "--prompts", data, "--max-new-tokens", 2)
    assert command_line("evaluate", "--draft-model", draft, *asked).code == 2
    words = train_words(good_target, data, marker.with_name("out"), f"draft.init_from={draft}")
    assert command_line("plan", *words).code == 2
    assert not marker.exists()


@pytest.mark.parametrize("name", ["index.json", "features-00000.safetensors"])
def test_features_run_nothing(command_line, good_target, data, marker, name):
    features = marker.with_name("features")
    words = ("--target", good_target, "--data", data)
    assert command_line("capture", *words, "--output", features, "draft.num_steps=2").code == 0
    (features / name).write_bytes(pickle.dumps(Payload(marker)))
    trains = train_words(good_target, data, marker.with_name("out"), f"data.features={features}")
    assert command_line("plan", *trains).code == 2
    assert command_line("capture", "--verify", features).code in (1, 2)
    assert not marker.exists()


# --- configuration ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        "!!python/object/apply:os.system ['touch {marker}']",
        "!!python/object/new:os.system ['touch {marker}']",
        "!!python/name:os.system",
    ],
)
def test_a_configuration_runs_nothing(command_line, good_target, data, marker, value):
    value = value.format(marker=marker)
    config = marker.with_name("run.yaml")
    config.write_text(f"target: {value}\ndata: {{path: {data}}}\n")
    assert command_line("plan", "--config", config).code == 2
    assert (
        command_line("plan", *train_words(good_target, data, marker.with_name("out"), f"output={value}")).code
        == 2
    )
    assert not marker.exists()


# --- the working directory --------------------------------------------------------------------------------------


SLOW_RENDERING = """\
from spec_trainer.data import row_encoder
row_encoder.ALONE_S = 0.0
from spec_trainer.cli.app import main
if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("command", ["plan", "check"])
def test_the_working_directory_is_imported_by_no_process(good_target, data, tmp_path, command):
    """``multiprocessing`` starts children, too, for rows that take long to render and for a backend's test.

    The workers of a run are started among traps by every test with a ``Lab``.
    """
    traps = Traps.lay(tmp_path / "traps")
    (tmp_path / "command.py").write_text(SLOW_RENDERING)
    started = [sys.executable, str(tmp_path / "command.py")]
    words = ["plan", *train_words(good_target, data, tmp_path / "out")]
    if command == "check":
        words = ["check", "--backend", "cpu"]
    path = os.pathsep.join(filter(None, [str(traps.site), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [*started, *words],
        cwd=traps.directory,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    traps.assert_untouched(started)
    assert done.returncode == 0, done.stderr
    seen = "\n".join(" ".join(words) for _, words in traps.starts())
    assert "multiprocessing.resource_tracker" in seen
    assert "multiprocessing.spawn" in seen
