"""Texts reach a template as parts where vLLM gives it parts, unless it writes the list itself."""

import pytest

PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TURN = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
END = "<|im_end|>\n{% endfor %}" + PROMPT
EACH = "{% for part in m.content %}{{ part.text }}{% endfor %}"
EITHER = "{% if m.content is string %}{{ m.content | trim }}{% else %}" + EACH + "{% endif %}"
CALLS = "{% for c in m.tool_calls or [] %}{{ '\n' if m.content }}<call>{{ c.function.name }}{% endfor %}"

QUESTION = {"role": "user", "content": "Weather? "}
RESULT = {"role": "tool", "content": "TWELVE"}
ANSWER = {"role": "assistant", "content": "It is 12."}


def call(**fields):
    return {"role": "assistant", **fields, "tool_calls": [{"function": {"name": "weather", "arguments": {}}}]}


@pytest.mark.parametrize(
    "loop",
    [
        TURN + EACH,
        TURN.replace("messages", "messages[0:]") + EACH.replace("m.content", "m['content']"),
        TURN + "{% set content = m.content %}" + EACH.replace("m.content", "content | list"),
    ],
)
def test_texts_are_there_where_a_template_reads_parts_alone(load, supervised, decoded, loop):
    dataset = load({"messages": [QUESTION, ANSWER]}, template=loop + END)
    assert decoded(dataset.sample(0)).startswith("<|im_start|>user\nWeather? <|im_end|>")
    assert supervised(dataset.sample(0)) == "It is 12.<|im_end|>"


def test_a_template_that_reads_both_gets_parts(load, decoded):
    dataset = load({"messages": [QUESTION, ANSWER]}, template=TURN + EITHER + END)
    assert decoded(dataset.sample(0)).startswith("<|im_start|>user\nWeather? <|im_end|>")


@pytest.mark.parametrize(
    "template",
    [
        TURN + EITHER.replace("m.content %}", "m.content.parts %}") + END,
        "{% for i in range(messages | length) %}{% set msg = messages[i] %}<|im_start|>{{ msg.role }}\n"
        + EITHER.replace("m.content", "msg.content")
        + END,
    ],
    ids=["parts of another kind", "no loop over messages"],
)
def test_without_a_loop_over_contents_texts_stay_texts(load, decoded, template):
    dataset = load({"messages": [QUESTION, ANSWER]}, template=template)
    assert decoded(dataset.sample(0)).startswith("<|im_start|>user\nWeather?<|im_end|>")


@pytest.mark.parametrize(
    "written", ["{{ m.content | trim }}", "{{ m.content | tojson }}", "{{ raise_exception('') }}"]
)
def test_a_role_of_which_the_template_does_not_write_parts_keeps_its_texts(load, decoded, written):
    if_system = (
        "{% if m.role == 'system' and m.content is not string %}"
        + written
        + "{% else %}"
        + EITHER
        + "{% endif %}"
    )
    system = {"role": "system", "content": "Brief. "}
    dataset = load({"messages": [system, QUESTION, ANSWER]}, template=TURN + if_system + END)
    assert decoded(dataset.sample(0)).startswith(
        "<|im_start|>system\nBrief.<|im_end|>\n<|im_start|>user\nWeather? <|im_end|>"
    )


def test_the_question_is_text_where_tools_make_the_template_write_the_list(load, decoded):
    with_tools = TURN + "{% if tools %}{{ m.content }}{% else %}" + EACH + "{% endif %}" + END
    rows = [{"messages": [QUESTION, ANSWER]} | tools for tools in ({}, {"tools": [{"type": "function"}]})]
    for order in (rows, rows[::-1]):
        for sample in load(*order, template=with_tools).train:
            assert decoded(sample).startswith("<|im_start|>user\nWeather? <|im_end|>")


@pytest.mark.parametrize(
    ("content", "samples"),
    [({}, 1), ({"content": None}, 1), ({"content": ""}, 2), ({"content": "I look."}, 1)],
)
def test_an_empty_text_is_a_part_in_the_next_request_and_adds_nothing_to_the_call(
    load, supervised, decoded, content, samples
):
    dataset = load(
        {"messages": [QUESTION, call(**content), RESULT, ANSWER]}, template=TURN + EITHER + CALLS + END
    )
    text = content.get("content")
    called = f"{text}\n<call>weather<|im_end|>" if text else "<call>weather<|im_end|>"
    assert supervised(*dataset.train) == f"{called}{' | ' if samples == 1 else ' || '}It is 12.<|im_end|>"
    assert ("assistant\n\n<call>" in decoded(dataset.train[-1])) == (samples == 2)
