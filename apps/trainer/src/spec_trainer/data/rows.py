"""Validate a row and recognise its form: a conversation, plain text, or tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from spec_core.wording import counted, shortened, shown
from spec_trainer.data.errors import BadRow
from spec_trainer.data.image_parts import ROW_KEYS, TEXT_ONLY, image_part, row_images, with_images
from spec_trainer.data.training_marks import MARKS, untrained_messages

# ShareGPT's roles in the words of chat templates; OpenAI's roles stand for themselves.
_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "observation": "tool",
    "function_response": "tool",
} | {role: role for role in ("system", "developer", "user", "assistant", "tool", "function")}

_OTHER_MEDIA = ("video", "videos", "audio", "audios")
_REMOVE = "remove what is not text from the row, or the row"
_TEXT_PARTS = ("text", "input_text", "output_text")
_SHAPES = "messages, conversations, text, or input_ids with loss_mask"


@dataclass(frozen=True)
class Chat:
    """A conversation in OpenAI's message format, with tools and settings."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    last_turn_only: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Template variables that the row specifies."""
    images: tuple[Any, ...] = ()
    """References of the images, in the order of their parts in ``messages``; not checked yet."""
    untrained: frozenset[int] = frozenset()
    """Numbers of the answers, counted from 0, that the row marks as not to be trained."""

    @property
    def answers(self) -> list[int]:
        """Indices of the assistant's messages, ascending."""
        return [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]

    def trained(self, last_turn_only: bool) -> list[int]:
        """Return the indices of the assistant's messages that are trained, ascending."""
        chosen = [index for number, index in enumerate(self.answers) if number not in self.untrained]
        return [index for index in chosen if not last_turn_only or index == self.answers[-1]]


@dataclass(frozen=True)
class Text:
    """A plain text; all its tokens are supervised."""

    text: str


@dataclass(frozen=True)
class Tokens:
    """A row that is already tokenised."""

    input_ids: np.ndarray
    """int64 [T]: token ids."""
    loss_mask: np.ndarray
    """bool [T]: whether token i is supervised."""
    last_turn_only: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Template variables with which the row was rendered, if the row specifies them."""
    images: tuple[Any, ...] = ()
    """Image references, in the order of their tokens in ``input_ids``; not checked yet."""


def parse_row(row: object, no_images: str = TEXT_ONLY) -> Chat | Text | Tokens:
    """Return the row as Chat, Text or Tokens. Raise BadRow if it has none of these forms.

    ``no_images``: reason for refusing images; if empty, the row may have images.
    """
    if isinstance(row, BadRow):
        raise row
    if not isinstance(row, Mapping):
        hint = "; a file of one JSON array is named .json" if isinstance(row, list) else ""
        raise BadRow("not an object", f"got {type(row).__name__}, expected an object with {_SHAPES}{hint}")
    # Parquet fills the columns that a row lacks with nulls.
    fields = {key: value for key, value in row.items() if value is not None}
    flag = fields.get("last_turn_only")
    if not isinstance(flag, bool | None):
        raise BadRow("bad last_turn_only", f"expected true or false, got {shown(flag)}")
    kwargs = fields.get("chat_template_kwargs")
    if not isinstance(kwargs, dict | None):
        raise BadRow("bad conversation", f"chat_template_kwargs is {shown(kwargs)}, expected an object")
    _check_media(fields, no_images)
    if "input_ids" in fields:
        images = () if no_images else row_images(fields)
        return replace(_tokens(fields, flag), chat_template_kwargs=kwargs, images=images)
    for key in ("messages", "conversations"):
        if key in fields:
            messages = _messages(key, fields[key], fields.get("system"), no_images)
            messages, images = (messages, ()) if no_images else with_images(messages, fields)
            chat = Chat(messages, _tools(fields.get("tools")), flag, kwargs, images)
            return replace(chat, untrained=_untrained_answers(chat, fields[key], fields.get("loss_mask")))
    if "text" in fields:
        return Text(_text(fields["text"]))
    keys = shortened(", ".join(map(str, fields)), 200)
    raise BadRow("unknown shape", f"expected {_SHAPES}; got {keys or 'nothing'}{_renaming(fields)}")


def _renaming(fields: Mapping[str, Any]) -> str:
    """Return the advice to rename a column that looks like a conversation; empty if no column does."""
    for key, value in fields.items():
        if isinstance(value, list) and value and all(isinstance(part, Mapping) for part in value):
            return f"; {shown(key)} looks like a conversation: rename it to messages"
    return ""


def _tokens(fields: Mapping[str, Any], last_turn_only: bool | None) -> Tokens:
    if "loss_mask" not in fields:
        raise BadRow("bad tokens", "input_ids without loss_mask")
    ids, mask = _integers("input_ids", fields["input_ids"]), _integers("loss_mask", fields["loss_mask"])
    if len(ids) != len(mask):
        raise BadRow("bad tokens", f"{len(ids)} input_ids but {counted(len(mask), 'value')} of loss_mask")
    if ((mask != 0) & (mask != 1)).any():
        raise BadRow("bad tokens", "loss_mask holds other values than 0 and 1")
    return Tokens(ids, mask.astype(bool), last_turn_only)


def _integers(name: str, values: object) -> np.ndarray:
    """Return the list ``values`` as int64 [T]; true and false are allowed only in a loss mask, as 1 and 0."""
    kinds = "iub" if name == "loss_mask" else "iu"
    try:
        array = np.asarray(values)
    except (ValueError, RecursionError):  # lists of different lengths, or without end
        array = np.empty((0, 0))
    if not isinstance(values, list) or array.ndim != 1 or (array.size and array.dtype.kind not in kinds):
        raise BadRow("bad tokens", f"{name} is not a list of integers")
    if name == "input_ids" and bool in set(
        map(type, values)
    ):  # beside integers, numpy takes them for 1 and 0
        raise BadRow("bad tokens", f"{name} holds true or false, expected integers")
    return array.astype(np.int64)


def _check_media(fields: Mapping[str, Any], no_images: str) -> None:
    for key in (*_OTHER_MEDIA, *(ROW_KEYS if no_images else ())):
        if fields.get(key):
            raise BadRow("not text alone", f"the row has {key!r}; {no_images or TEXT_ONLY}; {_REMOVE}")


def _messages(key: str, turns: object, system: object, no_images: str) -> list[dict[str, Any]]:
    """Return the messages of a conversation; the row's separate ``system`` prompt, if any, comes first."""
    if not isinstance(turns, list) or not turns:
        raise BadRow("bad conversation", f"{key} is not a list of at least one message")
    messages = [_message(f"{key}[{index}]", turn, no_images) for index, turn in enumerate(turns)]
    if not system:
        return messages
    if not isinstance(system, str) or messages[0]["role"] == "system":
        raise BadRow(
            "bad conversation", f"system is {shown(system)}, expected text and no system message besides"
        )
    return [{"role": "system", "content": system}, *messages]


def _untrained_answers(chat: Chat, turns: list[Mapping[str, Any]], mask: object) -> frozenset[int]:
    """Return the numbers of the answers that the row marks as not to be trained."""
    system = len(chat.messages) - len(turns)
    untrained = {index + system for index in untrained_messages(turns, mask)}
    return frozenset(number for number, index in enumerate(chat.answers) if index in untrained)


def _message(name: str, turn: object, no_images: str) -> dict[str, Any]:
    """Convert a message, also ShareGPT's {from, value}, to OpenAI's {role, content}; keep other keys."""
    if not isinstance(turn, Mapping):
        raise BadRow("bad conversation", f"{name} is not an object")
    message = {key: value for key, value in turn.items() if value is not None and key not in MARKS}
    speaker = message.pop("from", None)
    role = message.get("role", speaker)
    if not isinstance(role, str) or role not in _ROLES:
        raise BadRow(
            "bad conversation", f"{name} has the role {shown(role)}, expected one of {', '.join(_ROLES)}"
        )
    value = message.pop("value", None)
    content = message.get("content", value)
    if content is None and not message.get("tool_calls"):
        raise BadRow("bad conversation", f"{name} has no content")
    if isinstance(message.get("reasoning"), str):
        message.setdefault("reasoning_content", message["reasoning"])
    if calls := message.pop("tool_calls", None):  # an empty list is none, as from servers: templates may ask
        _check_tool_calls(name, calls)
        message["tool_calls"] = calls
    message["role"] = _ROLES[role]
    return message if content is None else {**message, "content": _content(name, content, no_images)}


def _check_tool_calls(name: str, calls: object) -> None:
    if not isinstance(calls, list):
        raise BadRow("bad conversation", f"tool_calls of {name} is not a list")
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        if isinstance(arguments, str) and arguments:
            _parsed(f"the arguments of a tool call of {name}", arguments)


def _parsed(what: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise BadRow("bad conversation", f"{what} are not JSON: {shown(text)}") from None


def _content(name: str, content: object, no_images: str) -> str | list[dict[str, Any]]:
    """Return a message's content as one string, or as a list of parts.

    It is a list if there are several parts or an image. Several parts of text are not joined here, because
    templates differ in what they write between parts.
    """
    if isinstance(content, list):
        parts = [found for part in content if (found := _part(name, part, no_images))]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) == len(parts) < 2:
            return "".join(texts)
        return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    if not isinstance(content, str):
        raise BadRow("bad conversation", f"the content of {name} is neither text nor a list of text parts")
    return content


def _part(name: str, part: object, no_images: str) -> str | dict[str, Any]:
    if isinstance(part, str):
        return part
    if not no_images and isinstance(part, Mapping) and (image := image_part(name, part)):
        return image
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(kind, str) and kind not in _TEXT_PARTS:
        raise BadRow(
            "not text alone",
            f"the content of {name} has a part of type {shown(kind)}; {no_images or TEXT_ONLY}; {_REMOVE}",
        )
    if not isinstance(part, Mapping) or kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
        raise BadRow("bad conversation", f"the content of {name} has a part that is not text")
    return part["text"]


def _tools(tools: object) -> list[dict[str, Any]] | None:
    if isinstance(tools, str) and tools:  # as columns of Parquet have them
        with suppress(BadRow):
            tools = _parsed("tools", tools)
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow("bad conversation", "tools is not a list of objects")
    return tools


def _text(text: object) -> str:
    if not isinstance(text, str):
        raise BadRow("bad text", f"text is {type(text).__name__}, expected a string")
    return text
