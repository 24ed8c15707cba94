"""Supervised text under chat templates, compared with what a server saw and generated.

``make test-templates`` takes the 858 templates that packages collect, in the folder that SPEC_TEST_TEMPLATES names.
"""

import os
from pathlib import Path

import pytest

from .conversations import SHAPES
from .judge import Judge, special_pattern
from .own_templates import OWN_TEMPLATES
from .server import Server
from .survey import page, survey, templates_in

FILES = os.environ.get("SPEC_TEST_TEMPLATES", "")
PAGE = Path(__file__).parents[2] / "docs" / "evidence" / "chat-templates.md"


@pytest.fixture(scope="module")
def own() -> dict:
    return {(one.template, one.shape): one for one in survey(OWN_TEMPLATES)}


@pytest.mark.parametrize("name", OWN_TEMPLATES)
def test_each_answer_is_supervised_once_in_the_context_that_a_server_saw(own, name) -> None:
    assert {shape: own[name, shape].breaks for shape in SHAPES if own[name, shape].breaks} == {}
    assert {shape for shape in SHAPES if own[name, shape].refused and own[name, shape].rendered} == set()


SAID = "<|im_start|>user\nuser0mark<|im_end|>\n<|im_start|>assistant\n"
PLAIN = [{"role": "user", "content": "user0mark"}, {"role": "assistant", "content": "answer1mark"}]


@pytest.mark.parametrize(
    ("sample", "wrong"),
    [
        ([(False, SAID), (True, "answer1mark<|im_end|>"), (False, "\n")], ""),
        ([(False, SAID), (False, "answer1mark<|im_end|>")], "answer supervised 0 times"),
        ([(False, SAID), (True, "answer1mark"), (False, "<|im_end|>")], "ends without"),
        ([(False, SAID[:15]), (True, SAID[15:]), (True, "answer1mark<|im_end|>")], "supervises user0mark"),
        ([(False, SAID[:-10]), (True, SAID[-10:] + "answer1mark<|im_end|>")], "supervises 'assistant"),
        ([(False, "<|im_start|>assistant\n"), (True, "answer1mark<|im_end|>")], "context ends with"),
        ([(False, SAID), (True, "answer1mark<|im_start|>")], "ends with"),
        ([(False, SAID), (True, "answer1mark\nIs it safe?<|im_end|>")], "supervises the template's words"),
    ],
)
def test_the_judge_tells_a_wrong_mask(sample, wrong) -> None:
    judge = Judge(Server(OWN_TEMPLATES["chatml"]), special_pattern({"<|im_start|>", "<|im_end|>"}), PLAIN)
    judge.judge([sample])
    assert [problem for problem in judge.breaks if problem.startswith(wrong)] if wrong else not judge.breaks


@pytest.mark.skipif(not FILES, reason="needs the files that make test-templates fetches")
@pytest.mark.timeout(3000)
def test_no_real_template_breaks_the_rule() -> None:
    outcomes = list(survey(templates_in(Path(FILES))))
    assert len(outcomes) == 858 * len(SHAPES)
    broken = {(one.template, one.shape): one.breaks for one in outcomes if one.kind == "broken"}
    assert broken == {}
    text = page(outcomes)
    if os.environ.get("SPEC_TEST_WRITE_PAGE"):
        begin = PAGE.read_text().partition("<!-- figures -->")[0]
        PAGE.write_text(f"{begin}<!-- figures -->\n\n{text}")
    assert text in PAGE.read_text(), "SPEC_TEST_WRITE_PAGE=1 make test-templates writes the page anew"
