"""A file that the user named stays what it is: only a new or a plain file is replaced."""

import os
import stat
from pathlib import Path

import pytest

from spec_core.errors import ConfigError, RunError
from spec_trainer.base.named_file import check_named_page, write_named_file

PAGE = "<!doctype html><html>τ</html>\n"


def test_a_new_file_and_an_earlier_report_are_replaced_as_a_whole(tmp_path):
    file = tmp_path / "report.html"
    for page in (PAGE, PAGE * 2, PAGE):
        check_named_page(file, "--report")
        write_named_file(file, page)
        assert file.read_text(encoding="utf-8") == page
    assert os.listdir(tmp_path) == ["report.html"]


def test_a_link_stays_a_link_and_its_file_is_written(tmp_path):
    (tmp_path / "2026.html").write_text(PAGE * 2, encoding="utf-8")
    link = tmp_path / "latest.html"
    link.symlink_to("2026.html")
    check_named_page(link, "--report")
    write_named_file(link, PAGE)
    assert os.readlink(link) == "2026.html"
    assert (tmp_path / "2026.html").read_text(encoding="utf-8") == PAGE


def test_a_pipe_stays_a_pipe_and_its_reader_gets_the_page(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    check_named_page(pipe, "--report")
    with pytest.raises(RunError, match=f"^{pipe} was not written: .*No such device or address"):
        write_named_file(pipe, PAGE)
    with os.fdopen(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), "rb") as reader:
        write_named_file(pipe, PAGE)
        assert reader.read().decode() == PAGE
    assert stat.S_ISFIFO(pipe.lstat().st_mode)


def test_the_pipe_that_a_shell_passes_is_written(tmp_path):
    """Bash's ``>(program)`` is a name below /dev/fd."""
    reader, writer = os.pipe()
    name = tmp_path / "fd"
    name.symlink_to(f"/dev/fd/{writer}")
    check_named_page(name, "--report")
    write_named_file(name, PAGE)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        assert stream.read().decode() == PAGE


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make a device")
def test_a_device_stays_a_device(tmp_path):
    null = tmp_path / "null"
    os.mknod(null, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    check_named_page(null, "--report")
    write_named_file(null, PAGE)
    assert stat.S_ISCHR(null.lstat().st_mode)
    assert os.listdir(tmp_path) == ["null"]


def test_a_file_of_something_else_is_not_overwritten(tmp_path):
    """The prompts of the same command, for one."""
    prompts, link = tmp_path / "prompts.jsonl", tmp_path / "link.html"
    prompts.write_text('{"prompt": "x"}\n')
    link.symlink_to(prompts)
    for file in (prompts, link):
        with pytest.raises(
            ConfigError, match=f"^--report={file} is there and is no report; name another file"
        ):
            check_named_page(file, "--report")


def test_what_no_file_can_be_is_refused(tmp_path):
    (tmp_path / "lost").symlink_to("nowhere")
    for file in (tmp_path, tmp_path / "lost", Path("/proc/report.html")):
        with pytest.raises(ConfigError, match=f"^--report={file} is not a file that can be written"):
            check_named_page(file, "--report")
    with pytest.raises(ConfigError, match="its folder does not exist"):
        check_named_page(tmp_path / "no" / "report.html", "--report")


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/stderr", "/dev/fd/1", "/proc/self/fd/2"])
def test_where_the_command_prints_is_refused(name):
    with pytest.raises(ConfigError, match=f"^--report={name} is where this command prints; name a file"):
        check_named_page(Path(name), "--report")
