import os

import pytest
import tokenizers

from spec_core import foreign_errors, read_json_object
from spec_core.errors import ArtifactError, TargetError
from spec_core.foreign import parse_json_object, read_bytes


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (ValueError("bad"), "it broke: bad"),
        (AttributeError("x"), "it broke: AttributeError: x"),
        (Exception(), "it broke: Exception"),
        (RecursionError("deep"), "it broke: it is nested too deeply"),
        (MemoryError(), "it broke: MemoryError"),
        (SystemExit(0), "it broke: SystemExit: 0"),
        (ValueError("first\nsecond"), "it broke: first"),
    ],
)
def test_any_foreign_error_becomes_one_line(raised, said):
    with pytest.raises(TargetError) as caught, foreign_errors(TargetError, "it broke"):
        raise raised
    assert str(caught.value) == said
    assert caught.value.__cause__ is raised


def test_errors_of_ours_and_interrupts_pass():
    with pytest.raises(ArtifactError, match=r"^mine$"), foreign_errors(TargetError, "it broke"):
        raise ArtifactError("mine")
    with pytest.raises(KeyboardInterrupt), foreign_errors(TargetError, "it broke"):
        raise KeyboardInterrupt


def test_a_panic_of_tokenizers_is_an_error_like_any_other():
    with pytest.raises(TargetError, match=r"^it broke: "), foreign_errors(TargetError, "it broke"):
        tokenizers.Tokenizer.from_str("{" * 3)


def test_only_regular_files_of_bounded_size_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TargetError, match="pipe is not a regular file"):
        read_bytes(tmp_path / "pipe", TargetError)
    with pytest.raises(TargetError, match="absent cannot be read: No such file"):
        read_bytes(tmp_path / "absent", TargetError)
    (tmp_path / "long").write_bytes(b"12345")
    assert read_bytes(tmp_path / "long", TargetError, max_bytes=5) == b"12345"
    with pytest.raises(TargetError, match="long has 5 bytes, expected at most 4"):
        read_bytes(tmp_path / "long", TargetError, max_bytes=4)


@pytest.mark.parametrize("text", ["", "{", "nul", '{"a":' * 100_000, b"\xff", "[" * 100_000])
def test_damaged_json_is_one_line(text):
    with pytest.raises(TargetError, match=r"^here is not JSON: "):
        parse_json_object(text, "here", TargetError)


def test_json_that_is_no_object(tmp_path):
    (tmp_path / "a.json").write_text("[1]")
    with pytest.raises(TargetError, match="holds no JSON object"):
        read_json_object(tmp_path / "a.json", TargetError)
    (tmp_path / "a.json").write_text('{"a": 1}')
    assert read_json_object(tmp_path / "a.json", TargetError) == {"a": 1}
