"""ChatML, a chat template like Qwen3's, conversations that use all of it, and a tokenizer of bytes."""

from collections.abc import Iterable, Sequence
from itertools import groupby

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
THINKING = """\
{%- if tools %}{{ '<|im_start|>system\\n' + (messages[0].content + '\\n' if messages[0].role == 'system' else '') }}
{%- for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
  {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
  {%- if m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}
    {%- if loop.index0 > ns.last and (loop.last or m.reasoning_content) %}
      {{- '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}{% endif %}
    {{- m.content or '' }}
    {%- for call in m.tool_calls or [] %}{{ '<call>' + call.function.name }}
      {%- for name, value in call.function.arguments.items() %}{{ ' ' + name + '=' + value | tojson }}{% endfor %}
    {%- endfor %}{{ '<|im_end|>\\n' }}
  {%- elif m.role != 'system' %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
  {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""

READS_PARTS = """\
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
  {%- if m.content is string %}{{ m.content }}
  {%- else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}
  {%- for call in m.tool_calls or [] %}{{ call | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def in_parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


CLOCK = {
    "type": "function",
    "function": {
        "name": "clock",
        "description": "Tells the time.",
        "parameters": {"type": "object", "properties": {}},
    },
}
CALL = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": '{"zone": "UTC"}'}}
QUESTION = {"role": "user", "content": "What is two and two?"}
CONVERSATIONS = [
    {"messages": [QUESTION]},
    {"messages": [{"role": "system", "content": "Be brief."}, QUESTION]},
    {
        "messages": [
            QUESTION,
            {"role": "assistant", "content": "Four.", "reasoning": "hm"},
            {"role": "user", "content": "Sure?"},
        ]
    },
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "The time?"},
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "tool", "content": "12:00", "tool_call_id": "1"},
        ],
        "tools": [CLOCK],
    },
    {"messages": [{"role": "user", "content": in_parts("What is two", "", "and two?")}]},
    {"messages": [{"role": "developer", "content": in_parts("Be brief.", "Be kind.")}, QUESTION]},
    {
        "messages": [
            QUESTION,
            {"role": "assistant", "content": "Four."},
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": "Sure?"},
        ]
    },
    {
        "messages": [
            QUESTION,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": in_parts("12:00", "UTC"), "tool_call_id": "1"},
        ],
        "tools": [{"type": "function", "function": {"strict": True, "name": "clock"}}],
    },
]
"""Each ends where an answer is due."""


def thinking_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, and the special ones of the template: 260 in all."""
    return byte_tokenizer(("<|im_start|>", "<|im_end|>", "<think>", "</think>"), THINKING, "<|im_end|>")


def byte_tokenizer(
    specials: Sequence[str], template: str, end: str | None = None, merges: Sequence[tuple[str, str]] = ()
) -> PreTrainedTokenizerFast:
    """A token for each byte, from 0, one for each of ``merges``, and the special ones behind them."""
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    tokenizer = Tokenizer(models.BPE({word: id_ for id_, word in enumerate(words)}, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, chat_template=template)


def stretches(ids: Iterable[int], mask: Iterable[object]) -> list[list[int]]:
    """Return the token ids of each stretch of supervised tokens."""
    pairs = groupby(zip(ids, mask, strict=True), key=lambda pair: bool(pair[1]))
    return [[int(id_) for id_, _ in stretch] for supervised, stretch in pairs if supervised]
