"""The samples that the trainer makes of a conversation under a chat template, as text."""

import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby, pairwise
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from spec_trainer.configuration.chat import ChatConfig
from spec_trainer.data.errors import BadRow
from spec_trainer.data.rows import parse_row
from spec_trainer.data.tokens import Encoded, Encoder

from ..chat_templates import byte_tokenizer
from .conversations import Message, tools
from .server import SPECIAL_TOKENS

# The forms in which vocabularies write tokens that no user can type. XML's are text, or tokens that are not special.
_SPECIAL = re.compile(
    r"<[|｜][^\s<>|｜'\"{}]{1,40}[|｜]?>|<[A-Za-z_/]{1,40}\|>|\[/?(?:INST|SYSTEM_PROMPT|TOOL_CALLS|TOOL_RESULTS|"
    r"AVAILABLE_TOOLS|ARGS|CALL_ID|TOOL_CONTENT|THINK|IMG|gMASK|MODEL_SETTINGS)\]|"
    r"</?s>|<eos>|<bos>|<eod>|<sop>|</?(?:start|end)_of_(?:turn|image|utterance)>|<SPECIAL_\d+>|<extra_id_\d+>|"
    r"<(?:beginning|end)_of_sentence>"
)


@dataclass(frozen=True)
class Span:
    """A stretch of supervised text, and all text before it in its sample."""

    before: str
    text: str


def special_tokens(templates: Iterable[str]) -> set[str]:
    """Texts of the templates that seem to be special tokens of their tokenizers."""
    return set(SPECIAL_TOKENS.values()).union(*(_SPECIAL.findall(template) for template in templates))


class Trainer:
    """Makes samples with a tokenizer of bytes, which has the special tokens of all templates."""

    def __init__(self, specials: Collection[str], folder: Path) -> None:
        tokenizer = byte_tokenizer(sorted(specials), "{{ messages }}", SPECIAL_TOKENS["eos_token"])
        for name, token in SPECIAL_TOKENS.items():
            setattr(tokenizer, name, token)
        tokenizer.save_pretrained(folder)
        self._tokenizer = tokenizer
        self._folder = folder

    def encoder(self, template: str) -> Encoder:
        return Encoder(self._folder, len(self._tokenizer), ChatConfig(chat_template=template))

    def samples(self, encoder: Encoder, messages: list[Message]) -> list[list[tuple[bool, str]]]:
        """The stretches of each sample of a conversation: whether supervised, and the text. May raise BadRow."""
        offered = tools(messages)
        row = {"messages": messages} | ({"tools": offered} if offered else {})
        return [list(self._stretches(sample)) for sample in encoder.encode(parse_row(row), False)]

    def _stretches(self, sample: Encoded) -> Iterable[tuple[bool, str]]:
        ids, position = sample.input_ids.tolist(), 0
        for supervised, group in groupby(sample.loss_mask.tolist()):
            length = len(list(group))
            yield supervised, self._tokenizer.decode(ids[position : position + length])
            position += length


def spans(sample: list[tuple[bool, str]], prompts: Collection[str]) -> Iterable[Span]:
    """The supervised spans of a sample; one that reaches over the end of a prompt is divided there."""
    text = "".join(part for _, part in sample)
    ends = {len(prompt) for prompt in prompts if text.startswith(prompt)}
    start = 0
    for supervised, part in sample:
        stop = start + len(part)
        borders = [start, *sorted(end for end in ends if start < end < stop), stop]
        if supervised:
            yield from (Span(text[:begin], text[begin:end]) for begin, end in pairwise(borders))
        start = stop


class _Day(datetime):
    @classmethod
    def now(cls, tz: object = None) -> datetime:
        return cls(2024, 7, 26)


class _Renderer:
    def render(self, **arguments: object) -> tuple[str, list[tuple[int, int]]]:
        try:
            texts, marks = render_jinja_template(**arguments)
        except Exception as error:
            raise BadRow("refused by the chat template", str(error)[:200]) from error
        return texts[0], [(start, stop) for start, stop in marks[0]] if marks else []


@contextmanager
def rendering_here() -> Iterator[None]:
    """Render in this process what the trainer would have a child process render, which takes a fifth of the time.

    Templates that ask for today's date get the date that the trainer puts in its place.
    """
    renderer = _Renderer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spec_trainer.data.chat.render_process", lambda: renderer)
        patch.setattr("transformers.utils.chat_template_utils.datetime", _Day)
        yield
