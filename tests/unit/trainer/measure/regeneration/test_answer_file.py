"""FILE.jsonl and its meta file: grows by whole lines, goes on after any end, is sorted, keeps out other files."""

import json
from pathlib import Path

import pytest

from spec_core.errors import ArtifactError, RunError
from spec_trainer.measure.regeneration.answer_file import AnswerFile

SETTINGS = {"seed": 1, "engine.name": "hf"}


def append(file: AnswerFile, *numbers: int, finish_reason: str = "stop") -> None:
    for number in numbers:
        text = 'ünï\n"finish_reason": "length", "row": 7}\n'
        logged = {"finish_reason": "length", "row": 7}  # a further key of the data
        file.append({"text": text, "logged": logged, "finish_reason": finish_reason, "row": number})


def opened(path: Path, **settings: object) -> AnswerFile:
    return AnswerFile(path, {**SETTINGS, **settings}, {"target": "t"})


def numbers(path: Path) -> list[int]:
    return [json.loads(line)["row"] for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "answers.jsonl"


def test_it_goes_on_with_the_rows_that_it_lacks_and_is_sorted_at_the_end(path):
    with opened(path) as file:
        assert (file.rows, file.complete) == (set(), False)
        append(file, 4, 0)
    with opened(path) as file:
        assert (file.rows, file.complete) == ({0, 4}, False)
        append(file, 1)
        assert numbers(path) == [4, 0, 1]
        assert file.seal() == {"rows_written": 3, "rows_cut": 0}
    with opened(path) as file:
        assert (file.rows, file.complete) == ({0, 1, 4}, True)
        assert file.seal() == {"rows_written": 3, "rows_cut": 0}
    assert numbers(path) == [0, 1, 4]
    assert sorted(file.name for file in path.parent.iterdir()) == [path.name, f"{path.name}.meta.json"]


@pytest.mark.parametrize("left", range(1, 170))
def test_half_a_line_is_dropped_wherever_it_was_cut(path, left):
    with opened(path) as file:
        append(file, 0)
        whole = path.stat().st_size
        append(file, 1)
    content = path.read_bytes()
    path.write_bytes(content[: min(whole + left, len(content) - 1)])
    with opened(path) as file:
        assert file.rows == {0}
        append(file, 1)
    assert path.read_bytes() == content


def test_a_first_line_that_was_cut_is_dropped_too(path):
    with opened(path) as file:
        append(file, 0)
    path.write_bytes(path.read_bytes()[:9])
    with opened(path) as file:
        assert file.rows == set()
    assert path.read_bytes() == b""


def test_a_full_disk_is_told_with_what_to_do_and_the_answers_before_it_stay(path, limit_files):
    with opened(path) as file:
        append(file, 0)
        limit_files(path.stat().st_size + 20)
        with pytest.raises(
            RunError, match=rf"an answer to {path} was not written: File too large .* run the same"
        ):
            append(file, 1)
    with opened(path) as file:
        assert file.rows == {0}


def test_cut_answers_are_counted_or_left_out(path):
    with opened(path) as file:
        append(file, 2)
        append(file, 1, 3, finish_reason="length")
        assert file.seal() == {"rows_written": 3, "rows_cut": 2}
        assert numbers(path) == [1, 2, 3]
    with opened(path) as file:
        assert file.seal(drop_cut=True) == {"rows_written": 1, "rows_cut": 0}
    with opened(path) as file:
        assert file.complete
    assert numbers(path) == [2]


def test_a_kill_between_the_sorted_file_and_its_meta_file_loses_nothing(path, monkeypatch):
    with opened(path) as file:
        append(file, 1, 0)
        with monkeypatch.context() as patch:
            patch.setattr(AnswerFile, "_write_meta", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                file.seal()
    with opened(path) as file:
        assert (file.rows, file.complete) == ({0, 1}, False)
        file.seal()
    assert numbers(path) == [0, 1]


def test_the_meta_file_says_how_the_answers_were_made(path):
    with opened(path) as file:
        append(file, 0)
        file.seal()
    meta = json.loads((path.parent / "answers.jsonl.meta.json").read_text())
    assert meta["settings"] == SETTINGS
    assert meta["target"] == "t"
    assert meta["result"]["rows_written"] == 1


def test_other_settings_are_refused_and_named(path):
    with opened(path) as file:
        append(file, 0)
    with pytest.raises(ArtifactError, match=r"made with other settings \(seed 1 there, 2 here\)"):
        opened(path, seed=2)
    assert numbers(path) == [0]


def test_a_file_without_answers_takes_any_settings(path):
    opened(path).close()
    with opened(path, seed=2) as file:
        append(file, 0)
    with opened(path, seed=2) as file:
        assert file.rows == {0}


def test_what_is_not_ours_is_left_alone(path):
    path.write_text("diary\n")
    with pytest.raises(ArtifactError, match=r"has no answers.jsonl.meta.json: it is not this command's"):
        opened(path)
    with pytest.raises(ArtifactError, match="is a folder"):
        opened(path.parent)
    with pytest.raises(ArtifactError, match="there is no folder"):
        opened(path.parent / "nowhere" / "answers.jsonl")
    assert path.read_text() == "diary\n"
    assert list(path.parent.iterdir()) == [path]


def test_a_folder_that_cannot_be_written_to_is_refused(path, monkeypatch):
    monkeypatch.setattr("os.access", lambda folder, mode: Path(folder) != path.parent)
    with pytest.raises(ArtifactError, match="is not a folder that can be written to"):
        opened(path)
    assert not path.exists()


@pytest.mark.parametrize("meta", ["", "[]", '{"settings": 1, "result": 2}'])
def test_a_damaged_meta_file_is_refused(path, meta):
    with opened(path) as file:
        append(file, 0)
    (path.parent / "answers.jsonl.meta.json").write_text(meta)
    with pytest.raises(ArtifactError, match=r"meta.json is damaged"):
        opened(path)


@pytest.mark.parametrize("line", ["what", '{"row": 1, "text": ""}', '{"row": "1"}'])
def test_a_line_that_is_no_answer_is_refused(path, line):
    with opened(path) as file:
        append(file, 0)
    with path.open("a") as other:
        other.write(f"{line}\n")
    with pytest.raises(ArtifactError, match="line 2 is no answer"):
        opened(path)


def test_a_second_command_is_kept_out(path):
    with opened(path), pytest.raises(ArtifactError, match="is being written by another command"):
        opened(path)


@pytest.mark.parametrize("end", ["", ".meta.json"])
def test_nothing_is_written_through_a_link(path, tmp_path, end):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.touch()
    path.with_name(path.name + end).symlink_to(elsewhere)
    with pytest.raises(ArtifactError, match="is a link: expected a file of its own"):
        opened(path)
    assert elsewhere.read_bytes() == b""
