"""Convert messages and tools to the form in which vLLM's chat endpoint passes them to a chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

Message = dict[str, Any]

_NAMES_DEVELOPER = re.compile(r"""(['"])developer\1""")
_FUNCTION_KEYS = ("name", "description", "parameters")
_OPTIONAL_KEYS = ("strict", "defer_loading")
_LOOP_OVER_MESSAGES = re.compile(r"\bfor\s+(\w+)\s+in\s+\w*messages\b")
_LOOP_OVER_CONTENT = re.compile(
    r"""\bfor\s+\w+\s+in\s+(?:\w*content|(\w+)(?:\[-?\d+\])?(?:\.content|\[\s*['"]content['"]\s*\]))"""
    r"\s*(?:-?%\}|\||if\b)"
)


def served_messages(messages: Sequence[Message], template: str, between_parts: str) -> list[Message]:
    """Return the messages with roles that the template supports, and text contents as strings.

    ``between_parts`` joins the text parts of a content; parts of a tool message are joined by line breaks. Developer
    messages become a system prompt if the template does not name the role ``developer``.
    """
    served = [_served(message, between_parts) for message in messages]
    if _NAMES_DEVELOPER.search(template) or all(message["role"] != "developer" for message in served):
        return served
    return _with_one_system_prompt(served)


def served_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool with its function's fields in vLLM's order; missing fields are null."""
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        return dict(tool)
    fields = {key: function.get(key) for key in _FUNCTION_KEYS}
    fields |= {key: function[key] for key in _OPTIONAL_KEYS if function.get(key) is not None}
    return {"type": "function", **tool, "function": fields}


def loops_over_parts(template: str) -> bool:
    """Return whether a template loops over a message's content, whereupon vLLM gives it each text as a part."""
    messages = {"messages", *_LOOP_OVER_MESSAGES.findall(template)}
    return any(not loop[1] or loop[1] in messages for loop in _LOOP_OVER_CONTENT.finditer(template))


def in_parts(messages: Sequence[Message], roles: Collection[str]) -> list[Message]:
    """Return the messages with each text of ``roles`` as a list of one part.

    The empty text of a last answer that calls tools stays a text: a template may take a list with an empty part for
    a content and write a line break before the calls, which no target generates.
    """

    def given(message: Message, last: bool) -> Message:
        text = message.get("content")
        alone = last and not text and message.get("tool_calls")
        if message["role"] not in roles or not isinstance(text, str) or alone:
            return message
        return {**message, "content": [{"type": "text", "text": text}]}

    return [given(message, index == len(messages) - 1) for index, message in enumerate(messages)]


def _served(message: Message, between_parts: str) -> Message:
    content, calls = message.get("content"), message.get("tool_calls")
    changed: Message = {}
    if isinstance(content, list) and all(part["type"] == "text" for part in content):
        between = "\n" if message["role"] == "tool" else between_parts
        changed["content"] = between.join(part["text"] for part in content)
    if isinstance(calls, list):
        changed["tool_calls"] = [_served_call(call) for call in calls]
    return message | changed


def _served_call(call: object) -> object:
    """Return a tool call with parsed arguments and with its fields in vLLM's order."""
    if not isinstance(call, dict) or not isinstance(function := call.get("function"), dict):
        return call
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    function = {**function, "arguments": arguments}
    return _first({**call, "function": _first(function, "arguments", "name")}, "id", "function", "type")


def _first(fields: Message, *keys: str) -> Message:
    return {key: fields[key] for key in keys if key in fields} | fields


def _with_one_system_prompt(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with all system and developer messages merged into one at the beginning."""
    prompts = [message for message in messages if message["role"] in ("system", "developer")]
    if len(prompts) == 1 and messages[0] is prompts[0]:
        merged = {**messages[0], "role": "system"}
    else:
        texts = [message["content"] for message in prompts if message.get("content")]
        merged = {"role": "system", "content": "\n\n".join(texts)}
    return [merged, *(message for message in messages if message["role"] not in ("system", "developer"))]
