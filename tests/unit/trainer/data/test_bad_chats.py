"""Conversations and templates that are refused, or make a row bad."""

import json
import sys

import pytest
from tokenizers import normalizers

from spec_core.errors import DataError
from spec_trainer.configuration.data import DataConfig
from spec_trainer.data.dataset import load_dataset

from ....chat_templates import CHATML, THINKING


def conversation(*contents, **extra):
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(contents)], **extra}


def test_a_turn_that_cannot_be_told_from_other_messages_makes_the_row_bad(load):
    said = (
        "{% for m in messages %}{% if m.role == 'ROLE' %}{{ '<|ROLE|>' + m.content }}{% endif %}{% endfor %}"
    )
    moves = said.replace("ROLE", "assistant") + said.replace("ROLE", "user")
    with pytest.raises(
        DataError, match=r"rows\.jsonl:1: assistant turn not found .*message 2 of 4.*last_turn_only"
    ):
        load(conversation("a", "b", "c", "d"), template=moves)


def test_a_token_across_the_border_of_a_turn_makes_the_row_bad(load):
    glued = "{% for m in messages %}{{ 'qui' if m.role == 'assistant' else m.content }}{% if m.role == 'assistant' %}"
    glued += "{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}"
    with pytest.raises(DataError, match="not made of whole tokens"):
        load(conversation("The ", "ck brown"), template=glued)


def test_a_character_that_the_tokenizer_swallows_is_named(load, tokenizer_kinds):
    def swallows():
        tokenizer = tokenizer_kinds.byte_level()
        tokenizer.normalizer = normalizers.Replace("\u00e9", "")
        return tokenizer

    with pytest.raises(
        DataError,
        match=r"does not keep the text of an assistant turn, from '\u00e9' \(U\+00E9\) on: characters",
    ):
        load(conversation("Hi", "caf\u00e9s"), build=swallows)


def test_what_the_template_refuses_is_a_bad_row_with_its_reason(load):
    strict = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}"
        + CHATML
    )
    row = {"messages": [{"role": "system", "content": "x"}, *conversation("a", "b")["messages"]]}
    with pytest.raises(
        DataError, match=r"rows\.jsonl:2: refused by the chat template: TemplateError: no system role here"
    ):
        load(conversation("a", "b"), row, template=strict)


def test_a_tokenizer_without_chat_template_is_refused_whatever_on_bad_row_says(load):
    with pytest.raises(DataError, match=r"has no chat template.*chat_template\.jinja") as caught:
        load(conversation("a", "b"), template=None, on_bad_row="skip")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (CHATML + "\n{% if %}", r"line \d+: Expected an expression, got 'end of statement block'"),
        (CHATML + "{{ messages | no_filter }}", r"line \d+: No filter named 'no_filter'\."),
    ],
)
@pytest.mark.parametrize("on_bad_row", ["error", "skip"])
def test_a_template_that_jinja_cannot_read_is_refused_whatever_on_bad_row_says(
    load, template, problem, on_bad_row
):
    with pytest.raises(
        DataError,
        match=rf"^the chat template of '.*' is no template of jinja: {problem}; mend it, or set data",
    ):
        load(conversation("a", "b"), template=template, on_bad_row=on_bad_row)


def test_very_many_turns_that_must_be_found_one_by_one_are_refused(load):
    mangles = CHATML.replace("m.content +", "(m.content | upper) +")
    with pytest.raises(
        DataError, match=r"turn not found .* {% generation %} marks in the template would show it"
    ):
        load(conversation(*["a", "B"] * 300), template=mangles, max_length=10**6)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="from Python 3.12 on, templates write such rows")
def test_a_row_that_is_nested_too_deeply_for_the_template_is_a_bad_row(load):
    calls = json.loads("[" * 900 + "]" * 900)
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [calls]}]}
    with pytest.raises(
        DataError, match=r"rows\.jsonl:1: refused by the chat template: it is nested too deeply"
    ):
        load(row)


@pytest.mark.parametrize("template", [5, [], {"x": "y"}])
def test_a_chat_template_that_is_none_is_refused(load, tmp_path, template):
    load(conversation("a", "b"))
    settings = tmp_path / "target" / "tokenizer_config.json"
    (tmp_path / "target" / "chat_template.jinja").unlink(missing_ok=True)
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": template}))
    data = DataConfig(path=str(tmp_path / "rows.jsonl"), eval_samples=0)
    with pytest.raises(DataError, match=r"tokenizer in '.*target' (cannot be|has no chat template)"):
        load_dataset(data, tmp_path / "target", 400)


def test_a_row_that_asks_for_another_rendering_is_refused(load):
    row = conversation("a", "b", chat_template_kwargs={"enable_thinking": False})
    load(row, template=THINKING, chat_template_kwargs={"enable_thinking": False})
    with pytest.raises(
        DataError, match=r"row's are \{'enable_thinking': False\}, data.chat_template_kwargs is \{\}"
    ):
        load(row, template=THINKING)
    rendered = {"input_ids": [1, 2], "loss_mask": [0, 1], "chat_template_kwargs": row["chat_template_kwargs"]}
    with pytest.raises(DataError, match="other variables of the template: the row's are"):
        load(rendered, template=THINKING)
