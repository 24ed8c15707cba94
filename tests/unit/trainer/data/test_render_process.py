"""Limits of the rendering of a chat template, and the ends of its process."""

import os
import resource
import signal
import threading
from contextlib import contextmanager, suppress

import psutil
import pytest

from spec_core.errors import DataError, RunError
from spec_trainer.configuration.data import DataConfig
from spec_trainer.data import render_process
from spec_trainer.data.errors import BadRow
from spec_trainer.data.render_process import OverLimit, RenderProcess
from spec_trainer.data.row_encoder import RowEncoder
from spec_trainer.data.row_files import DataRow

from ....chat_templates import CHATML
from .conftest import VOCAB

MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
BUSY = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


pytestmark = pytest.mark.xdist_group("renderings")  # of a process that several tests share


@pytest.fixture(scope="module")
def process():
    process = RenderProcess()
    yield process
    process.close()


@pytest.fixture
def shared(process, monkeypatch):
    """A process that renders on, however many of the tests have gone over its limits."""
    monkeypatch.setattr(render_process, "MOST_OVER", 1000)
    return process


@pytest.fixture
def rendering():
    process = RenderProcess()
    yield process
    process.close()


def words(template):
    return {"conversations": [MESSAGES], "chat_template": template}


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ range(10**9) | list }}", "OverflowError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "nested too deeply"),
        ("{{ 'a' * 10**11 }}", "it takes more than 128 MiB of memory"),
        (
            "{% set x = namespace(y='ab') %}{% for i in range(60) %}{% set x.y = x.y ~ x.y %}{% endfor %}",
            "it takes more than 128 MiB of memory",
        ),
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "it takes more than 0.2 s",
        ),
        ("{{ ('ab ' * 10**8)|title }}", "it takes more than"),
        ("{{ ('<a>b' * 10**7)|striptags }}", "it takes more than"),
        ("{{ ('www.a.b/ ' * 10**6)|urlize }}", "it takes more than"),
        # C code that nothing interrupts, as the comparison below, but for longer.
        pytest.param("{{ 5|round(-99999999) }}", "it takes more than 0.2 s", marks=pytest.mark.slow),
        ("{{ 'x' * 2**19 }}", "it makes 524288 characters, expected at most 26[23]"),
        (
            "{% set x = namespace(a=[1], b=[1]) %}{% for i in range(60) %}{% set x.a = [x.a] * 9 %}"
            "{% set x.b = [x.b] * 9 %}{% endfor %}{{ x.a == x.b }}",
            "it takes more than 0.2 s",
        ),
    ],
    ids=[
        "range",
        "macro",
        "string",
        "doubling",
        "loops",
        "title",
        "striptags",
        "urlize",
        "digits",
        "text",
        "equal",
    ],
)
def test_a_template_without_end_is_refused(shared, monkeypatch, template, why):
    monkeypatch.setattr(render_process, "SECONDS", 0.2)
    monkeypatch.setattr(render_process, "BYTES", 128 << 20)
    with pytest.raises(BadRow, match=f"refused by the chat template: .*{why}"):
        shared.render(**words(template))


def test_a_long_conversation_may_be_as_long_as_its_text(shared):
    messages = [{"role": "user", "content": "a" * 2**20}]
    text, _ = shared.render(conversations=[messages], chat_template="{{ messages[0].content * 4 }}")
    assert len(text) == 2**22
    with pytest.raises(OverLimit, match="it makes 10485760 characters"):
        shared.render(conversations=[messages], chat_template="{{ messages[0].content * 10 }}")


def test_no_handler_of_jinja_hides_that_the_time_is_over(rendering, monkeypatch):
    monkeypatch.setattr(render_process, "SECONDS", 0.2)
    others = set(psutil.Process().children())
    with pytest.raises(
        OverLimit
    ):  # Jinja evaluates constants as it compiles, and ignores any Exception there
        rendering.render(**words("{{ ('a ' * (5 * 10**6))|title }}"))
    (child,) = set(psutil.Process().children()) - others
    assert child.is_running()  # so it was not the kernel that ended the rendering


@pytest.mark.slow
def test_what_earlier_renderings_leave_behind_gives_later_ones_no_more_memory(rendering, monkeypatch):
    monkeypatch.setattr(render_process, "BYTES", 256 << 20)
    monkeypatch.setattr(render_process, "MOST_OVER", 10)
    largest = 0
    for _ in range(4):
        with pytest.raises(OverLimit):
            rendering.render(**words("{{ ('ab ' * 10**8)|title }}"))
        largest = max([largest, *(child.memory_info().vms for child in psutil.Process().children())])
    assert largest < 1 << 30


def test_a_template_that_is_over_its_limits_again_and_again_is_given_up(rendering, monkeypatch):
    monkeypatch.setattr(render_process, "SECONDS", 0.1)
    for _ in range(render_process.MOST_OVER - 1):
        with pytest.raises(OverLimit):
            rendering.render(**words(BUSY))
    with pytest.raises(DataError, match="exceeded its limits 5 times, at last as it takes more than") as last:
        rendering.render(**words(BUSY))
    assert not isinstance(last.value, BadRow)  # data.on_bad_row=skip goes on after those


def test_a_generation_prompt_without_end_costs_one_rendering_of_a_row(load, monkeypatch):
    monkeypatch.setattr(render_process, "SECONDS", 0.2)
    template = "{% if add_generation_prompt %}" + BUSY + "{% endif %}" + CHATML
    with pytest.raises(DataError, match="refused by the chat template: it takes more than"):
        load({"messages": MESSAGES * 3}, template=template)


def test_an_error_that_the_template_writes_is_short(shared):
    with pytest.raises(BadRow) as refused:
        shared.render(**words("{{ raise_exception('x' * 10**7) }}"))
    assert len(str(refused.value)) < 1_000


def test_a_process_that_somebody_kills_is_no_fault_of_the_row(rendering):
    others = set(psutil.Process().children())
    rendering.render(**words(CHATML))
    (child,) = set(psutil.Process().children()) - others
    threading.Timer(0.3, os.kill, (child.pid, signal.SIGKILL)).start()
    with pytest.raises(RunError, match="renders chat templates was killed; see whether memory is short"):
        rendering.render(**words(BUSY))
    text, _ = rendering.render(**words(CHATML))
    assert text.startswith("<|im_start|>user")


@contextmanager
def no_more_files():
    """Let this process open no further file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
    taken = []
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_row_is_not_bad_if_the_machine_has_no_file_descriptors(tokenizer_folder):
    encoder = RowEncoder(
        config=DataConfig(path="rows.jsonl", on_bad_row="skip"),
        tokenizer_folder=tokenizer_folder(),
        vocab_size=VOCAB,
        longest_prompt=None,
        with_questions=False,
    )
    row = DataRow("rows.jsonl:1", {"messages": MESSAGES})
    assert encoder.encode(row).samples[0].loss_mask.any()
    render_process.render_process().close()
    with (
        no_more_files(),
        pytest.raises(RunError, match="the machine is at fault: Too many open files; raise the limit"),
    ):
        encoder.encode(row)
    assert encoder.encode(row).samples[0].loss_mask.any()


def test_a_closed_process_for_templates_is_gone_and_starts_again():
    others, rendering = set(psutil.Process().children()), RenderProcess()
    words = {"conversations": [[{"role": "user", "content": "a"}]], "chat_template": CHATML}
    for _ in range(2):
        text, _ = rendering.render(**words)
        assert text == "<|im_start|>user\na<|im_end|>\n"
        (child,) = set(psutil.Process().children()) - others
        rendering.close()
        assert not child.is_running()
