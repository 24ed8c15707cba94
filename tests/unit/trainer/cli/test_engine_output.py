"""Output of engines while they run, and the file that takes it."""

import logging
import os
import subprocess
import sys

import pytest

from spec_core.errors import ConfigError, EngineError
from spec_kit.hosting import SubprocessEngine
from spec_trainer.cli.engine_output import engine_output_kept

ENGINE = logging.getLogger("spec_kit.hosting.engine_subprocess")
THIRD_PARTY = logging.getLogger("acme_engine.http")


class Acme(SubprocessEngine):
    """An engine of a third party, over our own hosting."""

    __module__ = "acme_engine.engine"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return the folder of the log file."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def chatter():
    print("from Python")
    os.write(1, b"from C\n")
    subprocess.run([sys.executable, "-c", "print('from a process')"], check=True)
    ENGINE.info("from a log")
    THIRD_PARTY.info("from a third party's log")


def lost_engine():
    chatter()
    raise EngineError("lost")


def test_nothing_that_an_engine_says_reaches_stdout(folder, capfd, caplog):
    caplog.set_level(logging.INFO)
    with engine_output_kept(Acme):
        chatter()
        ENGINE.warning("mind the gap")
    print("document")
    assert capfd.readouterr().out == "document\n"
    assert [record.message for record in caplog.records] == ["mind the gap"]
    assert list(folder.iterdir()) == []


def test_a_failure_names_the_file_that_has_it_all(folder, capfd, caplog):
    caplog.set_level(logging.INFO, "spec_trainer")
    with pytest.raises(EngineError), engine_output_kept(Acme):
        lost_engine()
    (file,) = folder.iterdir()
    assert str(file) in caplog.text
    text = file.read_text()
    for line in ("from Python", "from C", "from a process", "from a log", "from a third party's log"):
        assert line in text
    assert capfd.readouterr().out == ""


def test_bad_usage_leaves_no_file(folder):
    with pytest.raises(ConfigError), engine_output_kept(Acme):
        raise ConfigError("a word")
    assert list(folder.iterdir()) == []


def test_loggers_are_as_before():
    loggers = [logging.getLogger(name) for name in ("spec_kit.hosting", "acme_engine")]
    before = [(logger.level, logger.propagate, list(logger.handlers)) for logger in loggers]
    with engine_output_kept(Acme):
        assert all(logger.handlers for logger in loggers)
    assert [(logger.level, logger.propagate, logger.handlers) for logger in loggers] == before
