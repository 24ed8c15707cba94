"""A rendering that the run directory keeps: taken where it was made from the same, and only there."""

import json
import os
import shutil
from pathlib import Path

import pytest

from spec_core.errors import DataError
from spec_trainer.configuration.data import DataConfig
from spec_trainer.data import kept
from spec_trainer.data.dataset import load_dataset
from spec_trainer.data.kept import keep_run_data, load_run_data
from spec_trainer.data.render_process import RenderProcess

from ....chat_templates import CHATML
from .conftest import VOCAB

ROWS = [
    {
        "messages": [
            {"role": "user", "content": f"What is {i}?"},
            {"role": "assistant", "content": "Four, I think."},
        ]
    }
    for i in range(12)
]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The run directory; all data is long."""
    monkeypatch.setattr(kept, "FEW_SAMPLES", 0)
    root = tmp_path / "run"
    root.mkdir()
    return root


@pytest.fixture
def arguments(folder, tokenizer_folder, write) -> tuple:
    """Arguments of ``load_run_data`` for ``ROWS``."""
    return DataConfig(path=write(*ROWS)), tokenizer_folder(), VOCAB, None, False, folder


@pytest.fixture
def renderings(monkeypatch) -> list[int]:
    """Has one item for each rendering."""
    calls: list[int] = []
    render = RenderProcess.render
    monkeypatch.setattr(
        RenderProcess, "render", lambda self, **given: calls.append(1) or render(self, **given)
    )
    return calls


def content(dataset) -> object:
    """All that a run uses of its data."""
    return (
        dataset.digest,
        str(dataset.report),
        [sample.where for sample in dataset.samples],
        [None if sample.prompt is None else sample.prompt.tolist() for sample in dataset.samples],
        [None if question is None else question.tolist() for question in dataset.questions],
        (len(dataset.train), len(dataset.held_out)),
    )


@pytest.mark.parametrize(("longest_prompt", "with_questions"), [(None, False), (50, False), (None, True)])
def test_what_is_kept_is_what_was_rendered(
    folder, renderings, tokenizer_folder, write, longest_prompt, with_questions
):
    config = DataConfig(
        path=write(*ROWS, "no JSON", {"text": "a b"}), on_bad_row="skip", max_length=30, eval_samples=3
    )
    arguments = config, tokenizer_folder(), VOCAB, longest_prompt, with_questions, folder
    first = load_run_data(*arguments)
    assert list(folder.iterdir()) == []  # whoever loads, writes nothing
    keep_run_data(first, folder)
    before = len(renderings)
    again = load_run_data(*arguments)
    assert len(renderings) == before
    assert content(again) == content(first)
    assert content(first) == content(
        load_dataset(config, arguments[1], VOCAB, longest_prompt, with_questions=with_questions)
    )
    keep_run_data(again, folder)
    assert content(load_run_data(*arguments)) == content(first)


def replace(file: Path, old: str, new: str) -> None:
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))


def forget_merges(file: Path) -> None:
    tokenizer = json.loads(file.read_text())
    del tokenizer["model"]["merges"][5:]
    file.write_text(json.dumps(tokenizer))


TEMPLATE = CHATML.replace("m.role +", "m.role + ':' +")
CHANGES = {
    "row": (lambda data, target: replace(data / "rows.jsonl", "What is 3", "What is 9"), {}),
    "file": (lambda data, target: shutil.copy(data / "rows.jsonl", data / "more.jsonl"), {}),
    "tokenizer": (lambda data, target: forget_merges(target / "tokenizer.json"), {}),
    "template": (lambda data, target: (target / "chat_template.jinja").write_text(TEMPLATE), {}),
    "template of the run": (lambda data, target: None, {"chat_template": TEMPLATE}),
    "length": (lambda data, target: None, {"max_length": 21}),
    "held-out data": (lambda data, target: None, {"eval_path": "data/rows.jsonl"}),
}
"""A change of the data or the target, and the keys of section ``data`` that are set."""


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_the_samples_has_them_rendered_anew(
    folder, renderings, tokenizer_folder, write, tmp_path, monkeypatch, change
):
    write(*ROWS, name="data/rows.jsonl")
    monkeypatch.chdir(tmp_path)
    target, values = tokenizer_folder(), {"path": "data"}
    old = load_run_data(DataConfig(**values), target, VOCAB, None, False, folder)
    keep_run_data(old, folder)
    edit, keys = CHANGES[change]
    edit(tmp_path / "data", target)
    values |= keys
    before = len(renderings)
    new = load_run_data(DataConfig(**values), target, VOCAB, None, False, folder)
    assert len(renderings) > before
    assert new.digest != old.digest
    assert content(new) == content(load_dataset(DataConfig(**values), target, VOCAB))
    keep_run_data(new, folder)
    assert len(list(folder.iterdir())) == 1
    assert content(old)  # it is still mapped


@pytest.mark.parametrize(
    "name", ["input_ids.npy", "loss_mask.npy", "lengths.npy", "record.json", "prompts.npy"]
)
@pytest.mark.parametrize("damage", ["gone", "cut", "changed"])
def test_a_damaged_rendering_is_made_anew(folder, renderings, arguments, name, damage):
    first = load_run_data(*arguments)
    keep_run_data(first, folder)
    (file,) = folder.glob(f"*/{name}")
    whole = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(whole[:-1] if damage == "cut" else whole[:-1] + bytes([whole[-1] ^ 1]))
    before = len(renderings)
    again = load_run_data(*arguments)
    assert len(renderings) > before
    assert content(again) == content(first)
    keep_run_data(again, folder)
    assert file.read_bytes() == whole


def test_what_a_killed_command_left_is_removed(folder, arguments):
    (folder / ".rendered-half").mkdir()
    (folder / ".rendered-half" / "input_ids.npy").write_text("half")
    dataset = load_run_data(*arguments)
    keep_run_data(dataset, folder)
    assert [file.name for file in folder.iterdir()] == [f".rendered-{dataset.origin}"]


def test_a_command_that_reads_while_another_writes_has_all_or_nothing(folder, arguments, write):
    first = load_run_data(*arguments)
    keep_run_data(first, folder)
    opened = load_run_data(*arguments)
    write(*ROWS[1:])
    keep_run_data(load_run_data(*arguments), folder)
    assert content(opened) == content(first)


def test_data_that_is_rendered_at_once_is_not_kept(folder, arguments, monkeypatch):
    monkeypatch.setattr(kept, "FEW_SAMPLES", len(ROWS))
    keep_run_data(load_run_data(*arguments), folder)
    assert list(folder.iterdir()) == []


def test_a_vast_file_is_not_read_whole_before_its_rows(folder, tokenizer_folder, tmp_path):
    file = tmp_path / "rows.parquet"
    with file.open("wb") as stream:
        stream.truncate(1 << 40)
    with pytest.raises(DataError, match=r"rows\.parquet"):
        load_run_data(DataConfig(path=str(file)), tokenizer_folder(), VOCAB, None, False, folder)


def test_without_room_the_run_goes_on(folder, arguments, caplog, full_disk):
    dataset = load_run_data(*arguments)
    with full_disk():
        keep_run_data(dataset, folder)
    assert "the rendered data is not kept" in caplog.text
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("name", ["vocab.txt", "additional_chat_templates/x.jinja", "further.tiktoken"])
@pytest.mark.parametrize("kind", ["pipe", "device", "vast"])
def test_a_special_file_among_the_tokenizer_s_is_refused_and_never_waited_for(
    tokenizer_folder, tmp_path, name, kind
):
    target = tokenizer_folder()
    file = target / name
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    else:
        with file.open("wb") as stream:
            stream.truncate(1 << 40)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    with pytest.raises(DataError, match=f"{name} (is not a regular file|has 1099511627776 bytes)"):
        load_run_data(DataConfig(path=str(rows)), target, VOCAB, None, False, tmp_path / "run")
