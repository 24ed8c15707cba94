"""The text before and after a supervised span is that of a server's request and of its answer."""

import pytest

from spec_core.errors import DataError

from ....chat_templates import CHATML

SYSTEM = {"role": "system", "content": "Be brief."}
QUESTION = {"role": "user", "content": "Two and two?"}
ANSWER = {"role": "assistant", "content": "It is four."}
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


@pytest.mark.parametrize(
    ("content", "learnt"),
    [("Four.<|im_end|>", "Four."), ("Four.<|im_end|>\nFive.", "Four."), ("<|im_end|>", "")],
)
def test_an_answer_ends_at_its_first_end_token(load, supervised, content, learnt):
    answers = [{"role": "assistant", "content": text} for text in (content, "Six.", content)]
    messages = [message for answer in answers for message in (QUESTION, answer)]
    dataset = load({"messages": messages}, template=CHATML)
    assert supervised(*dataset.train) == f"{learnt}<|im_end|> | Six.<|im_end|> | {learnt}<|im_end|>"


LATE_SYSTEM = (  # like Mistral Nemo's
    "{% for m in messages %}{% if m.role == 'user' %}<s>{% if loop.last and messages[0].role == 'system' %}"
    "{{ messages[0].content }} {% endif %}{{ m.content }}<|end|>{% elif m.role == 'assistant' %}{{ m.content }}</s>"
    "{% endif %}{% endfor %}"
)


def test_a_system_prompt_that_stands_in_the_last_question_is_in_every_context(load, decoded):
    dataset = load({"messages": [SYSTEM, *[QUESTION, ANSWER] * 3]}, template=LATE_SYSTEM)
    asked, answered = "<s>Two and two?<|end|>", "<s>Be brief. Two and two?<|end|>It is four.</s>"
    earlier = asked + "It is four.</s>"
    assert [decoded(sample) for sample in dataset.train] == [earlier * turns + answered for turns in range(3)]


MERGES_SYSTEM = (  # into the first message, like those made for Gemma 2
    "{% for m in messages %}{% if m.role != 'system' %}<|im_start|>{{ m.role }}\n"
    "{% if messages[0].role == 'system' and loop.index0 == 1 %}{{ messages[0].content }}\n{% endif %}{{ m.content }}"
    "<|im_end|>\n{% endif %}{% endfor %}" + PROMPT
)
WANTS_A_QUESTION = (  # like Qwen3.5's
    "{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}{{ raise_exception('whom?') }}"
    "{% endif %}" + CHATML
)


@pytest.mark.parametrize("template", [MERGES_SYSTEM, WANTS_A_QUESTION], ids=["merged", "refused"])
def test_an_answer_after_a_system_prompt_alone_is_context_where_no_request_shows_it(
    load, supervised, template
):
    opening = {"role": "assistant", "content": "Hello."}
    dataset = load({"messages": [SYSTEM, opening, QUESTION, ANSWER]}, template=template)
    assert supervised(*dataset.train) == "It is four.<|im_end|>"


GOES_ON = (  # a request that ends with an answer has the target go on with it
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if m.role == 'user' or not loop.last %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role == 'user' %}<|im_start|>assistant\n{% endif %}"
)


def test_an_answer_behind_an_answer_that_the_target_would_go_on_with_is_refused(load, supervised):
    messages = [QUESTION, ANSWER, {"role": "assistant", "content": "Or five."}]
    dataset = load({"messages": messages}, template=CHATML)
    assert supervised(*dataset.train) == "It is four.<|im_end|> | Or five.<|im_end|>"
    with pytest.raises(DataError, match="not found in the rendered conversation: message 3 of 3"):
        load({"messages": messages}, template=GOES_ON)


RESUMES = (  # like Gemma 4's: an answer behind results of tools goes on with the turn, the request for it does not
    "{% for m in messages %}{% if m.role == 'user' %}<|start|>user\n{{ m.content }}<turn|>\n"
    "{% elif m.role == 'tool' %}{{ m.content }}{% if loop.last %}<turn|>\n{% endif %}"
    "{% else %}{% if loop.previtem.role == 'user' %}<|start|>model\n{% endif %}"
    "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% if not loop.nextitem or loop.nextitem.role == 'user' %}<turn|>\n{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role == 'user' %}<|start|>model\n<think></think>{% endif %}"
)


def test_an_end_of_turn_before_a_thought_does_not_close_it(load, supervised, decoded):
    call, result = {"role": "assistant", "content": "I look."}, {"role": "tool", "content": "4"}
    dataset = load({"messages": [QUESTION, call, result, {**ANSWER, "reasoning": "hm"}]}, template=RESUMES)
    assert supervised(*dataset.train[1:]) == "<think>hm</think>It is four.<turn|>"
    assert "I look.4<turn|>\n<think>hm" in decoded(dataset.train[-1])
