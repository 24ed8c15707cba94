"""A panic of a compiled library is told by the exception alone; all else that was printed is printed."""

import json
import os

import pytest

from spec_core.errors import DataError
from spec_trainer.base.panics import without_panic_lines
from spec_trainer.data.tokens import Encoder

from ....chat_templates import CHATML, byte_tokenizer


class Panic(BaseException):
    """As compiled libraries raise."""


@pytest.mark.parametrize(
    ("error", "printed"),
    [(None, "said\n"), (ValueError, "said\n"), (KeyboardInterrupt, "said\n"), (Panic, "")],
)
def test_only_a_panics_lines_are_dropped(capfd, error, printed):
    def say():
        with without_panic_lines():
            os.write(2, b"said\n")
            if error is not None:
                raise error

    if error is None:
        say()
    else:
        with pytest.raises(error):
            say()
    assert capfd.readouterr() == ("", printed)


def test_a_tokenizer_that_panics_at_its_first_text_is_refused_without_its_lines(tmp_path, capfd):
    byte_tokenizer(("<|im_start|>", "<|im_end|>"), CHATML, None).save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    fields = json.loads(file.read_text(encoding="utf-8"))
    fields["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "BAAAAP///38="}
    file.write_text(json.dumps(fields))
    with pytest.raises(
        DataError, match=f"^the tokenizer in '{tmp_path}' cannot be read: PanicException: index out of"
    ):
        Encoder(tmp_path, 300).decode([1])
    assert capfd.readouterr() == ("", "")
