"""Which tokens of a conversation are supervised."""

import json
import random

import numpy as np
import pytest

from spec_trainer.data import turns
from spec_trainer.data.render_process import RenderProcess

from ....chat_templates import CHATML, CONVERSATIONS, READS_PARTS, THINKING, in_parts

TURNS = ["Hi there", "The quick fox.", "And then?", " Four,  I think\n"]


def conversation(*contents, **extra):
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(contents)], **extra}


MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


# Drops the reasoning of all turns but those after the last question, and shows an empty one there (like Qwen3).
FORGETS_REASONING = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set parts = m.content.split('</think>') %}"
    "{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}"
    "{{ '<think>\n' + (parts[0].split('<think>')[-1].strip() if parts|length > 1 else '') + '\n</think>\n\n' }}"
    "{% endif %}{{ parts[-1].strip() + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' + opening }}{% endif %}"
)


ENDINGS_DIFFER = (
    "{% for m in messages %}{{ '<|start|>' + m.role }}{% if m.role == 'assistant' %}{{ ' final' }}{% endif %}"
    "{{ '<|message|>' + m.content }}"
    "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)


TRAILING_EOS = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)


NO_PROMPT = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content.strip() + ' </s>' }}{% endif %}{% endfor %}"
)


NO_END_OF_TURN = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


NO_SPECIALS = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def forgets_reasoning(opening: str = "") -> str:
    return FORGETS_REASONING.replace("opening", repr(opening))


BOTH = "b<|im_end|> | d<|im_end|>"


DIVIDED = "b<|im_end|> || d<|im_end|>"


LAYOUTS = {
    "chatml": (CHATML, BOTH),
    "without a generation prompt": (CHATML[: CHATML.index("{% if add_generation_prompt %}")], BOTH),
    "always with a generation prompt": (
        CHATML.replace("{% if add_generation_prompt %}", "{% if true %}"),
        BOTH,
    ),
    "an empty thought in the last turn": (forgets_reasoning(), DIVIDED),
    "a generation prompt that opens a thought": (forgets_reasoning("<think>\n"), DIVIDED),
    "an end of turn that depends on the place": (
        ENDINGS_DIFFER,
        " final<|message|>b<|return|> ||  final<|message|>d<|return|>",
    ),
    "more after the end of turn": (TRAILING_EOS, "b<|end|> | d<|end|>"),
    "no end of turn but the next header": (NO_END_OF_TURN, "b<|user|> | d<|user|>"),
    "no special tokens": (NO_SPECIALS, "b\n | d\n"),
}
"""Templates, and the texts that a draft learns of a conversation a, b, c, d."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_content_and_end_of_turn_are_supervised_in_every_layout(load, supervised, layout):
    template, learnt = LAYOUTS[layout]
    assert supervised(*load(conversation("a", "b", "c", "d"), template=template).train) == learnt


def test_a_template_that_marks_and_one_that_does_not_agree(load):
    rows = [conversation(*TURNS), conversation("a", "b"), conversation("a", "", "b", "c <|im_end|> d")]
    derived, marked = load(*rows, template=CHATML), load(*rows, template=MARKED)
    for one, other in zip(derived.train, marked.train, strict=True):
        np.testing.assert_array_equal(one.input_ids, other.input_ids)
        np.testing.assert_array_equal(one.loss_mask, other.loss_mask)
    assert derived.digest == marked.digest


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_last_turn_only_is_a_setting_and_a_row_flag_that_wins(load, supervised, template):
    rows = [conversation(*TURNS, last_turn_only=flag) for flag in (None, True, False)]
    last, both = " Four,  I think\n<|im_end|>", "The quick fox.<|im_end|> |  Four,  I think\n<|im_end|>"
    without = load(*rows, template=template)
    assert [supervised(sample) for sample in without.train] == [both, last, both]
    with_setting = load(*rows, template=template, last_turn_only=True)
    assert [supervised(sample) for sample in with_setting.train] == [last, last, both]


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_the_last_assistant_turn_counts_even_if_the_user_spoke_last(load, supervised, template):
    dataset = load(conversation("a", "b", "c", "d", "e"), template=template, last_turn_only=True)
    assert supervised(dataset.sample(0)) == "d<|im_end|>"


def test_reasoning_that_a_template_forgets_is_supervised_where_it_was_generated(load, supervised):
    first, second = "<think>\nhm\n</think>\n\nFour.", "<think>\nah\n</think>\n\nFive."
    dataset = load(conversation("two and two?", first, "and one?", second), template=forgets_reasoning())
    assert supervised(*dataset.train) == f"{first}<|im_end|> || {second}<|im_end|>"


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
def test_a_template_without_generation_prompt_is_understood(load, supervised, kind, request):
    build = getattr(request.getfixturevalue("tokenizer_kinds"), kind)
    dataset = load(conversation("Hi", "The fox", "c", "Four"), template=NO_PROMPT, build=build)
    assert [part.split() for part in supervised(dataset.sample(0)).split("|")] == [
        ["The", "fox", "</s>"],
        ["Four", "</s>"],
    ]


def test_a_conversation_that_the_assistant_begins_is_understood(load, supervised):
    row = {"messages": [{"role": "assistant", "content": "Hi"}, {"role": "user", "content": "Yo"}]}
    assert supervised(load(row).sample(0)) == "Hi<|im_end|>"


def test_text_of_several_bytes_per_character_is_supervised_whole(load, supervised):
    dataset = load(conversation("¿qué?", "日本 🦊 naïve"))
    assert supervised(dataset.sample(0)) == "日本 🦊 naïve<|im_end|>"


def test_tools_reach_the_template(load, supervised):
    template = "{% if tools %}{{ tools[0].name }}{% endif %}" + CHATML
    with_tools, without = load(
        conversation("a", "b", tools=[{"name": "clock"}]), conversation("a", "b"), template=template
    ).train
    assert len(with_tools) > len(without)


def test_a_template_that_writes_the_date_gives_the_same_samples_every_day(load, monkeypatch):
    dated = "{{ strftime_now('%Y-%m-%d') }}" + CHATML
    fixed = load(conversation("a", "b"), template=dated)
    written = load(conversation("a", "b"), template="2024-07-26" + CHATML)
    assert fixed.digest == written.digest


TEMPLATES = {
    **{layout: template for layout, (template, _) in LAYOUTS.items()},
    "no prompt": NO_PROMPT,
    "mangles": CHATML.replace("m.content +", "(m.content if m.content|length < 9 else m.content | upper) +"),
}


def random_conversation(draw, length=20):
    words = [
        "a", " b ", "fox\n", "<|im_end|>", "<|im_end|> ", "", "<think>\nx\n</think>\n\ny", "Four,  I think",
    ]  # fmt: skip
    roles = ["user", "assistant"] if draw.random() < 0.7 else ["user", "assistant", "assistant", "user"]
    spoken = [
        (roles[i % len(roles)], "".join(draw.choices(words, k=draw.randint(0, 3)))) for i in range(length)
    ]
    return {"messages": [{"role": role, "content": content} for role, content in spoken]}


@pytest.mark.parametrize("template", [*TEMPLATES.values(), THINKING], ids=[*TEMPLATES, "thinking"])
def test_turns_of_one_frame_lie_where_each_would_be_found_by_itself(load, monkeypatch, template):
    draw = random.Random(0)
    rows = [random_conversation(draw, length) for length in (20, 4, 6, 9, 20, 2)]
    together = load(*rows, template=template, on_bad_row="skip")
    monkeypatch.setattr(turns, "frames_of", lambda *_: {})
    alone = load(*rows, template=template, on_bad_row="skip")
    assert together.digest == alone.digest
    assert str(together.report) == str(alone.report)


def test_what_is_found_in_a_row_does_not_depend_on_the_rows_before_it(load):
    draw = random.Random(1)
    rows = [random_conversation(draw, length) for length in (20, 4, 6, 9)]
    for template in TEMPLATES.values():
        masks = []
        for order in (rows, rows[::-1]):
            found = load(*order, {"text": "a b"}, template=template, on_bad_row="skip")
            masks.append({one.input_ids.tobytes(): one.loss_mask.tolist() for one in found.train})
        assert masks[0] == masks[1]


def test_the_renderings_of_a_conversation_do_not_grow_with_it(load, supervised, monkeypatch):

    calls = []
    render = RenderProcess.render
    monkeypatch.setattr(
        RenderProcess, "render", lambda self, **given: calls.append(1) or render(self, **given)
    )
    load(conversation(*["a", "b"] * 4))
    few = len(calls)
    dataset = load(conversation(*["a", "b"] * 2_000), max_length=10**6)
    assert len(calls) == 2 * few
    assert supervised(dataset.sample(0)) == " | ".join(["b<|im_end|>"] * 2_000)


@pytest.mark.timeout(30)
def test_an_answer_of_end_tokens_takes_no_longer_than_another(load, supervised):
    row = conversation("a", "<|im_end|> " * 40_000)
    assert supervised(load(row, max_length=10**6).sample(0)) == "<|im_end|>"


@pytest.mark.parametrize(
    ("kwargs", "reasoning"), [({}, "<think>\nhm\n</think>\n\n"), ({"enable_thinking": False}, "")]
)
def test_empty_reasoning_that_the_template_writes_is_never_supervised(load, supervised, kwargs, reasoning):
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Four."}]}
    thought = {"messages": [row["messages"][0], row["messages"][1] | {"reasoning": "hm"}]}
    dataset = load(row, thought, template=THINKING, chat_template_kwargs=kwargs)
    assert supervised(dataset.sample(0)) == "Four.<|im_end|>"
    assert supervised(dataset.sample(1)) == f"{reasoning}Four.<|im_end|>"
    said = {"messages": [row["messages"][0], {"role": "assistant", "content": "<think>\n</think>\n\nFour."}]}
    dataset = load(said, template=CHATML)
    assert supervised(dataset.sample(0)) == "<think>\n</think>\n\nFour.<|im_end|>"


@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}])
def test_calls_of_tools_reach_the_template_as_a_server_passes_them(load, supervised, kwargs):
    tools = json.dumps(CONVERSATIONS[3]["tools"])  # as a column of Parquet has them
    asked = CONVERSATIONS[3]["messages"]
    answered = [*asked, {"role": "assistant", "content": "Noon."}]
    rows = [{"messages": messages, "tools": tools} for messages in (asked, answered)]
    dataset = load(*rows, template=THINKING, chat_template_kwargs=kwargs)
    call = '<call>clock zone="UTC"<|im_end|>'
    assert supervised(*dataset.train) == f"{call} || {call} || Noon.<|im_end|>"


@pytest.mark.parametrize(("template", "between"), [(CHATML, "\n"), (READS_PARTS, "")], ids=["text", "parts"])
def test_parts_of_a_content_are_what_the_template_makes_of_them(load, supervised, template, between):
    rows = [conversation(in_parts("a", "b"), in_parts("Four", "", " it is.")), conversation("a", "b")]
    dataset = load(*rows, template=template)
    assert supervised(dataset.sample(0)) == f"Four{between} it is.<|im_end|>"
    joined = load(conversation(f"a{between}b", f"Four{between} it is."), rows[1], template=template)
    assert dataset.digest == joined.digest


def test_a_call_is_found_where_history_shows_no_empty_thought_and_the_prompt_does(load, supervised):
    spaced = THINKING.replace("'<call>'", "('\n' if m.content else '') + '<call>'")
    messages = [*CONVERSATIONS[3]["messages"], {"role": "assistant", "content": "Noon."}]
    dataset = load({"messages": messages}, template=spaced, chat_template_kwargs={"enable_thinking": False})
    assert supervised(*dataset.train) == '<call>clock zone="UTC"<|im_end|> || Noon.<|im_end|>'


def test_reasoning_within_an_answer_is_left_out_where_the_prompt_says_there_is_none(load, supervised):
    thought = "<think>\nhm\n</think>\n\nFour."
    without_thinking = forgets_reasoning("<think>\n\n</think>\n\n")
    dataset = load(conversation("a", thought, "b", thought), template=without_thinking)
    assert supervised(*dataset.train) == "Four.<|im_end|> || Four.<|im_end|>"


def test_a_system_prompt_beside_the_conversation_comes_first(load):
    inside, outside = load(
        {"messages": [{"role": "system", "content": "Be brief."}, *conversation("a", "b")["messages"]]},
        {
            "system": "Be brief.",
            "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}],
        },
    ).train
    np.testing.assert_array_equal(inside.input_ids, outside.input_ids)


def test_a_template_that_asks_whether_there_are_calls_sees_none_of_an_empty_list(load, supervised):
    asks = CHATML.replace("m.content +", "('calls' if 'tool_calls' in m else m.content) +")
    row = conversation("a", "b")
    row["messages"][1]["tool_calls"] = []
    assert supervised(load(row, template=asks).sample(0)) == "b<|im_end|>"
