"""Read the questions to send to a server, from benchmarks or from any data file that training accepts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from spec_core.errors import DataError
from spec_trainer.configuration.chat import ChatConfig, PromptConfig
from spec_trainer.data.errors import BadRow
from spec_trainer.data.image_parts import PART
from spec_trainer.data.row_images import ImageFiles
from spec_trainer.data.rows import Chat, Text, Tokens, parse_row
from spec_trainer.data.sources import check_answers, read_rows
from spec_trainer.measure.evaluation.benchmarks import parse_benchmarks, read_benchmarks
from spec_trainer.measure.evaluation.request import EvaluationRequest

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True, kw_only=True)
class Question:
    """A request to a server, without its sampling options."""

    path: str
    """URL path: ``CHAT`` for a conversation, which the server renders; ``COMPLETION`` for text or tokens."""
    fields: Mapping[str, Any]
    """The JSON fields of the request that hold the prompt."""
    right: Decimal | str | None = None
    """The right answer, a number or the letter of a choice; None if the question has none."""


def read_questions(
    request: EvaluationRequest, chat: PromptConfig, answer: Callable[[Sequence[Question]], Sequence[str]]
) -> list[Question]:
    """Return the questions of an evaluation request; ``answer`` returns the target's answers to questions.

    A benchmark's later turns include the answers to the earlier turns. Raise DataError, with the row's
    location, if a row holds no question.
    """
    if request.prompts is not None:
        return _of_file(request.prompts, chat)
    rows = read_benchmarks(parse_benchmarks(request.bench), request.bench_data)
    asked = [[_conversation([_message("user", row.questions[0])], chat)] for row in rows]
    turn = 1
    while waiting := [place for place, row in enumerate(rows) if len(row.questions) > turn]:
        answers = answer([asked[place][-1] for place in waiting])
        for place, text in zip(waiting, answers, strict=True):
            before = asked[place][-1].fields["messages"]
            now = [*before, _message("assistant", text), _message("user", rows[place].questions[turn])]
            asked[place].append(_conversation(now, chat))
        turn += 1
    return [
        replace(question, right=row.right) for row, own in zip(rows, asked, strict=True) for question in own
    ]


def _of_file(path: Path, chat: PromptConfig) -> list[Question]:
    check_answers(str(path), chat)
    files = ImageFiles(chat.media_root)
    questions: list[Question] = []
    for row in read_rows(str(path)):
        try:
            questions.append(_question(parse_row(row.content, no_images=""), chat, files))
        except BadRow as bad:
            raise DataError(f"{row.where}: {bad}") from bad
    if not questions:
        raise DataError(f"{path} holds no prompt")
    return questions


def _question(row: Chat | Text | Tokens, chat: ChatConfig, files: ImageFiles) -> Question:
    if isinstance(row, Chat):
        messages = row.messages[: row.answers[-1]] if row.answers else row.messages
        if not messages:
            raise BadRow("nothing to answer")
        messages = _with_images(messages, row.images, files)
        tools = {"tools": row.tools} if row.tools else {}
        return _conversation(messages, chat, {"chat_template_kwargs": row.chat_template_kwargs, **tools})
    if isinstance(row, Text):
        return Question(path=COMPLETION, fields={"prompt": row.text})
    from spec_trainer.data.tokens import last_run

    start = int(last_run(row.loss_mask).argmax())
    return Question(path=COMPLETION, fields={"prompt": row.input_ids[: start or None].tolist()})


def _conversation(
    messages: Sequence[Mapping[str, Any]], chat: ChatConfig, more: Mapping[str, Any] | None = None
) -> Question:
    fields = {"messages": list(messages), "chat_template_kwargs": chat.chat_template_kwargs or None}
    given = {**fields, **{name: value for name, value in (more or {}).items() if value}}
    return Question(path=CHAT, fields={name: value for name, value in given.items() if value})


def _with_images(
    messages: Sequence[Mapping[str, Any]], references: Sequence[Any], files: ImageFiles
) -> list[Mapping[str, Any]]:
    """Return the messages with images as data: URIs, in OpenAI's form. Raise BadRow for an unusable image."""
    left = iter(enumerate(references, start=1))

    def filled(part: Mapping[str, Any]) -> Mapping[str, Any]:
        if part != PART:
            return part
        return {"type": "image_url", "image_url": {"url": files.data_uri(*next(left))}}

    return [
        {**message, "content": [filled(part) for part in content]}
        if isinstance(content := message.get("content"), list)
        else message
        for message in messages
    ]


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
