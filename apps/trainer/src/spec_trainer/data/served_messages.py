"""Messages and tools as vLLM's chat endpoint hands them to a chat template."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Message = dict[str, Any]

_NAMES_DEVELOPER = re.compile(r"""(['"])developer\1""")
_FUNCTION_KEYS = ("name", "description", "parameters")
_OPTIONAL_KEYS = ("strict", "defer_loading")


def served_messages(messages: Sequence[Message], template: str, between_parts: str) -> list[Message]:
    """Return messages whose contents are texts, with roles that the template knows.

    ``between_parts`` joins the texts of a content that is given in parts; a tool's are joined by line breaks. A
    developer's message is a system prompt to a template that does not name that role.
    """
    served = [_served(message, between_parts) for message in messages]
    if _NAMES_DEVELOPER.search(template) or all(message["role"] != "developer" for message in served):
        return served
    return _with_one_system_prompt(served)


def served_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool with the fields of its function in the server's order, absent ones null."""
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        return dict(tool)
    fields = {key: function.get(key) for key in _FUNCTION_KEYS}
    fields |= {key: function[key] for key in _OPTIONAL_KEYS if function.get(key) is not None}
    return {"type": "function", **tool, "function": fields}


def _served(message: Message, between_parts: str) -> Message:
    content, calls = message.get("content"), message.get("tool_calls")
    changed: Message = {}
    if isinstance(content, list):
        between = "\n" if message["role"] == "tool" else between_parts
        changed["content"] = between.join(part["text"] for part in content)
    if isinstance(calls, list):
        changed["tool_calls"] = [_served_call(call) for call in calls]
    return message | changed


def _served_call(call: object) -> object:
    """Return a call with arguments as an object and fields in the server's order, which templates may show."""
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
    """Return developers' messages as system prompts, all prompts as one where one stands behind the first message."""
    prompts = [message for message in messages if message["role"] in ("system", "developer")]
    if len(prompts) == 1 and messages[0] is prompts[0]:
        merged = {**messages[0], "role": "system"}
    else:
        texts = [message["content"] for message in prompts if message.get("content")]
        merged = {"role": "system", "content": "\n\n".join(texts)}
    return [merged, *(message for message in messages if message["role"] not in ("system", "developer"))]
