"""Text that a target generated is supervised, in the context in which a server had it generate that."""

import pytest

from spec_core.errors import DataError
from spec_trainer.data.render_process import RenderProcess

from ....chat_templates import CHATML

QUESTION = {"role": "user", "content": "Weather in Oslo?"}
RESULT = {"role": "tool", "content": "TWELVE"}
ANSWER = {"role": "assistant", "content": "It is 12."}


def call(city="Oslo", **fields):
    function = {"name": "weather", "arguments": {"city": city}}
    return {"role": "assistant", **fields, "tool_calls": [{"type": "function", "function": function}]}


CALLS = (
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments.city }}{% endfor %}"
)
OSLO = "<call>weather Oslo"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
LAST_QUESTION = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
TURN = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
WITHOUT_PROMPT = (  # like Mistral's
    "{% for m in messages %}{% if m.role == 'user' %}<s>{{ m.content }}<|end|>{% elif m.role == 'tool' %}"
    "[R]{{ m.content }}[/R]{% else %}{% if m.reasoning_content %}[THINK]{{ m.reasoning_content }}[/THINK]{% endif %}"
    "{{ m.content }}" + CALLS + "</s>{% endif %}{% endfor %}"
)
FORGETS = (  # drops the reasoning before the last question, like Qwen3's
    LAST_QUESTION + TURN + "{% if m.role == 'assistant' and m.reasoning_content and loop.index0 > ns.last %}"
    "<think>{{ m.reasoning_content }}</think>\n{% endif %}{{ m.content }}"
    + CALLS
    + "<|im_end|>\n{% endfor %}"
    + PROMPT
)
MARKS_THE_LAST_QUESTION = (  # Hunyuan's manner: R of an earlier turn has another question than the whole
    LAST_QUESTION
    + TURN
    + "{{ m.content }}{{ '/think' if loop.index0 == ns.last }}"
    + CALLS
    + "<|im_end|>\n{% endfor %}"
    + PROMPT
)
NESTED = (  # the results of calls lie in the turn that calls, like Gemma 4's
    "{% for m in messages %}{% if m.role != 'tool' %}<|im_start|>{{ m.role }}\n"
    + CALLS
    + "{% if m.tool_calls and not loop.last and loop.nextitem.role == 'tool' %}[R]{{ loop.nextitem.content }}[/R]"
    "{% endif %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}" + PROMPT
)
CHANNELS = (  # drops the reasoning of calls once there is an answer, and ends a last answer otherwise, like gpt-oss'
    "{% set ns = namespace(done=false) %}{% for m in messages %}{% if m.role == 'assistant' and not m.tool_calls %}"
    "{% set ns.done = true %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.reasoning_content and (loop.last or not ns.done) %}"
    "<|start|>assistant analysis<|message|>{{ m.reasoning_content }}<|end|>{% endif %}<|start|>assistant"
    "{% if m.tool_calls %} to=" + CALLS + "<|im_end|>{% else %} final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last else '<|end|>' }}{% endif %}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
TEXT_ALONE = CHATML
"""Writes no tool calls."""


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": "I look."}])
@pytest.mark.parametrize(
    ("template", "end"),
    [(WITHOUT_PROMPT, "</s>"), (FORGETS, "<|im_end|>"), (MARKS_THE_LAST_QUESTION, "<|im_end|>")],
    ids=["without prompt", "forgets", "marks the last question"],
)
def test_a_turn_ends_after_its_calls(load, supervised, template, end, content):
    dataset = load({"messages": [QUESTION, call(**content), RESULT, ANSWER]}, template=template)
    said = content.get("content") or ""
    assert supervised(*dataset.train) == f"{said}{OSLO}{end} | It is 12.{end}"


def test_a_call_is_learnt_where_a_further_question_changes_the_turns_before_it(load, supervised):
    messages = [QUESTION, call(content="I look."), RESULT, ANSWER, QUESTION, ANSWER]
    dataset = load({"messages": messages}, template=MARKS_THE_LAST_QUESTION)
    learnt = f"I look.{OSLO}<|im_end|> | It is 12.<|im_end|> || It is 12.<|im_end|>"
    assert supervised(*dataset.train) == learnt


def test_results_that_a_template_moves_into_the_turn_that_calls_are_context(load, supervised, decoded):
    dataset = load({"messages": [QUESTION, call(content="I look."), RESULT, ANSWER]}, template=NESTED)
    assert supervised(*dataset.train) == f"{OSLO}I look.<|im_end|> || It is 12.<|im_end|>"
    called, answered = map(decoded, dataset.train)
    assert "TWELVE" not in called
    assert f"{OSLO}[R]TWELVE[/R]I look.<|im_end|>" in answered


AGENT = [
    QUESTION,
    call(reasoning="Oslo first"),
    RESULT,
    call("Rome", reasoning="now Rome"),
    RESULT,
    {**ANSWER, "reasoning": "both known"},
    {"role": "user", "content": "Thanks"},
    {"role": "assistant", "content": "Welcome.", "reasoning": "polite"},
]


def test_each_step_of_an_agent_is_learnt_in_the_context_in_which_it_was_generated(load, supervised, decoded):
    dataset = load({"messages": AGENT}, template=FORGETS)
    steps = [
        f"<think>Oslo first</think>\n{OSLO}<|im_end|>",
        "<think>now Rome</think>\n<call>weather Rome<|im_end|>",
        "<think>both known</think>\nIt is 12.<|im_end|>",
    ]
    assert supervised(*dataset.train) == " | ".join(steps) + " || <think>polite</think>\nWelcome.<|im_end|>"
    chain, last = map(decoded, dataset.train)
    assert chain.endswith(steps[-1])
    assert "Oslo first" not in last
    assert [sample.sample_id for sample in dataset.samples] == [0, 1]
    assert "several samples, because the chat template rewrites earlier turns: 1 (first: " in str(
        dataset.report
    )
    assert ": 2 samples)" in str(dataset.report)


def test_reasoning_that_a_template_drops_stays_in_its_answers_context(load, supervised, decoded):
    dataset = load({"messages": AGENT[:6]}, template=CHANNELS)
    assert supervised(*dataset.train) == (
        f" analysis<|message|>Oslo first<|end|><|start|>assistant to={OSLO}<|im_end|> | "
        " analysis<|message|>now Rome<|end|><|start|>assistant to=<call>weather Rome<|im_end|> | "
        " analysis<|message|>both known<|end|><|start|>assistant final<|message|>It is 12.<|return|>"
    )
    (sample,) = dataset.train
    assert decoded(sample).count("analysis") == 3


def test_reasoning_is_learnt_without_a_generation_prompt(load, supervised):
    row = {"messages": [QUESTION, {**ANSWER, "reasoning": "easy"}]}
    dataset = load(row, template=WITHOUT_PROMPT)
    assert supervised(*dataset.train) == "[THINK]easy[/THINK]It is 12.</s>"


def test_an_empty_answer_ends_as_any_other(load, supervised):
    empty = {"role": "assistant", "content": ""}
    rows = {"messages": [QUESTION, empty]}, {"messages": [QUESTION, empty, QUESTION, ANSWER]}
    dataset = load(*rows, template=CHANNELS)
    learnt = [
        " final<|message|><|return|>",
        " final<|message|><|return|>",
        " final<|message|>It is 12.<|return|>",
    ]
    assert supervised(*dataset.train) == " || ".join(learnt)


@pytest.mark.parametrize(
    ("template", "learnt"),
    [
        (CHANNELS, " final<|message|>It is 12.<|return|>"),
        (FORGETS, "It is 12.<|im_end|>"),
        (
            FORGETS.replace(
                "<|im_start|>assistant\n{% endif %}", "{{ messages[0].x }}<|im_start|>assistant\n{% endif %}"
            ),
            "It is 12.<|im_end|>",
        ),
        (WITHOUT_PROMPT, "It is 12.</s>"),
    ],
    ids=["channels", "forgets", "no prompt before the first message", "without prompt"],
)
def test_an_answer_that_opens_a_conversation_is_learnt_without_its_header(load, supervised, template, learnt):
    dataset = load({"messages": [ANSWER, QUESTION]}, template=template)
    assert supervised(*dataset.train) == learnt


OPENS_OTHERWISE = {
    "with a system prompt in it": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if loop.first %}Be brief. {% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}" + PROMPT
    ),
    "without an end": (
        TURN + "{{ m.content }}{% if loop.index > 1 %}<|im_end|>{% endif %}\n{% endfor %}" + PROMPT
    ),
}


@pytest.mark.parametrize("template", OPENS_OTHERWISE.values(), ids=OPENS_OTHERWISE)
def test_an_answer_that_opens_a_conversation_otherwise_than_a_reply_is_context(load, supervised, template):
    opening = {"role": "assistant", "content": "Hello"}
    dataset = load({"messages": [opening, QUESTION, ANSWER]}, template=template)
    assert supervised(*dataset.train) == "It is 12.<|im_end|>"


def test_text_that_a_template_writes_after_the_last_answer_is_refused(load):
    guard = TURN + "{{ m.content }}\n{% endfor %}Is the last answer safe?<|im_end|>\n" + PROMPT
    with pytest.raises(DataError, match="text of its own after the last answer"):
        load({"messages": [QUESTION, ANSWER]}, template=guard)


def test_text_after_the_last_answer_that_only_rows_with_tools_have_refuses_these(load, supervised):
    asks = TURN + "{{ m.content }}<|im_end|>\n{% endfor %}{% if tools %}Name an action.\n{% endif %}" + PROMPT
    rows = [{"messages": [QUESTION, ANSWER]} | tools for tools in ({"tools": [{"type": "function"}]}, {})]
    for order in (rows, rows[::-1]):
        dataset = load(*order, template=asks, on_bad_row="skip")
        assert supervised(*dataset.train) == "It is 12.<|im_end|>"
        assert "text of its own after the last answer" in str(dataset.report)


def test_calls_that_a_template_does_not_write_are_not_learnt_as_an_end(load, supervised):
    dataset = load({"messages": [QUESTION, call(content="I look."), RESULT, ANSWER]}, template=TEXT_ALONE)
    assert supervised(*dataset.train) == "It is 12.<|im_end|>"
    assert "not with their calls, or not as after a question; they are not trained: 1 (first: " in str(
        dataset.report
    )


def test_a_template_that_lists_answers_before_questions_is_refused(load):
    moves = "{% for role in ('assistant', 'user') %}{% for m in messages %}{% if m.role == role %}"
    moves += "<s>{{ m.content }}{% endif %}{% endfor %}{% endfor %}"
    with pytest.raises(
        DataError, match="assistant turn not found in the rendered conversation: message 2 of 4"
    ):
        load({"messages": [QUESTION, ANSWER, {"role": "user", "content": "b"}, ANSWER]}, template=moves)


def test_rows_of_several_samples_are_held_out_as_a_whole(load):
    rows = [
        {"messages": [{"role": "user", "content": f"question {number}"}, *AGENT[1:]]} for number in range(6)
    ]
    dataset = load(*rows, template=FORGETS, eval_samples=3)
    assert (len(dataset.train), len(dataset.held_out)) == (8, 4)
    assert {one.where for one in dataset.train}.isdisjoint(one.where for one in dataset.held_out)
    assert [sample.sample_id for sample in dataset.samples] == list(range(12))


def test_a_sample_whose_answer_the_cut_takes_away_is_left_out(load, supervised):
    thought = {**ANSWER, "reasoning": "easy"}
    row = {"messages": [QUESTION, thought, {"role": "user", "content": "x" * 200}, thought]}
    dataset = load(row, template=FORGETS, max_length=150)
    assert supervised(*dataset.samples) == "<think>easy</think>\nIt is 12.<|im_end|>"


def test_a_marked_template_is_followed_in_the_context_of_the_server(load, supervised):
    marked = (
        LAST_QUESTION + TURN + "{% if m.role == 'assistant' %}{% generation %}{% if m.reasoning_content and "
        "loop.index0 > ns.last %}<think>{{ m.reasoning_content }}</think>\n{% endif %}{{ m.content }}"
        + CALLS
        + "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
        + PROMPT
    )
    by_marks = supervised(*load({"messages": AGENT}, template=marked).train)
    assert by_marks == supervised(*load({"messages": AGENT}, template=FORGETS).train)


def test_marks_that_begin_before_the_answer_are_noted(load):
    marks_header = CHATML.replace(
        "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}",
        "{% generation %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endgeneration %}",
    )
    dataset = load({"messages": [QUESTION, ANSWER]}, template=marks_header)
    assert "marks that begin before the answer: 1 (first: " in str(dataset.report)


@pytest.mark.parametrize(
    ("template", "messages", "renderings"),
    [(FORGETS, AGENT, 2 * 4), (CHATML, [QUESTION, ANSWER] * 4, 2), (FORGETS, [QUESTION, ANSWER], 2)],
    ids=["agent", "chat", "one answer"],
)
def test_a_row_takes_at_most_two_renderings_for_each_answer(
    load, monkeypatch, template, messages, renderings
):
    calls = []
    render = RenderProcess.render
    monkeypatch.setattr(
        RenderProcess, "render", lambda self, **given: calls.append(1) or render(self, **given)
    )
    rows = [{"messages": [{"role": "system", "content": text}, *messages]} for text in ("a", "b", "c")]
    load(*rows[:2], template=template)
    two = len(calls)
    load(*rows, template=template)
    assert len(calls) - 2 * two == renderings
