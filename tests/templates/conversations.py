"""Conversations of every shape that servers log, in which each text is a mark of its own."""

import re
from typing import Any

Message = dict[str, Any]

MARK = re.compile(r"[a-z]+\d+(?:x\d+)?mark|descriptionmark|placemark")
"""Any text of a conversation or of its tools."""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "descriptionmark",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string", "description": "placemark"}},
                "required": ["place"],
            },
        },
    }
]

# Each letter is a message: who speaks, and what an answer has besides its text.
SHAPES = {
    "plain": "user answer", "system": "system user answer",
    "several turns": "user answer user answer user answer",
    "system, several turns": "system user answer user answer user answer",
    "reasoning": "user thought+answer", "earlier reasoning": "user thought+answer user thought+answer",
    "call, content empty": "user call+empty tool answer", "call, content null": "user call tool answer",
    "text before the call": "user call+answer tool answer",
    "parallel calls": "user call+call tool tool answer user answer",
    "agent chain": "user thought+call+empty tool thought+call+empty tool thought+answer user thought+answer",
    "calls and questions": "user call+empty tool answer user thought+call+answer tool thought+answer",
    "answer opens": "answer user answer", "system, answer opens": "system answer user answer",
    "empty answer": "user empty user answer",
}  # fmt: skip
"""Name -> the messages, each as the parts that it has, joined by ``+``."""


def conversation(shape: str) -> list[Message]:
    """The messages of a shape. Their texts are ``<part><index of the message>mark``."""
    return [_message(index, parts.split("+")) for index, parts in enumerate(SHAPES[shape].split())]


def tools(messages: list[Message]) -> list[dict[str, Any]] | None:
    """The tools of a conversation; None if it calls none."""
    return TOOLS if any("tool_calls" in message for message in messages) else None


def _message(index: int, parts: list[str]) -> Message:
    if parts[0] in ("user", "system"):
        return {"role": parts[0], "content": f"{parts[0]}{index}mark"}
    if parts[0] == "tool":
        # Nine letters and digits, as some templates want; the results follow their calls in order.
        named = {"tool_call_id": f"lookup{index:03}", "name": "look_up"}
        return {"role": "tool", **named, "content": f"tool{index}mark"}
    message: Message = {"role": "assistant", "content": None}
    if "answer" in parts or "empty" in parts:
        message["content"] = f"answer{index}mark" if "answer" in parts else ""
    if "thought" in parts:
        message["reasoning"] = f"thought{index}mark"
    if "call" in parts:
        message["tool_calls"] = [_call(index, number) for number in range(parts.count("call"))]
    return message


def _call(index: int, number: int) -> dict[str, Any]:
    arguments = f'{{"place": "argument{index}x{number}mark"}}'
    function = {"arguments": arguments, "name": "look_up"}
    return {"id": f"lookup{index + 1 + number:03}", "function": function, "type": "function"}


def marks(message: Message) -> list[str]:
    """The texts of one message that a template may write: content, thought and arguments."""
    found = [message.get("content"), message.get("reasoning"), *arguments(message)]
    return [text for text in found if text]


def arguments(message: Message) -> list[str]:
    """The texts of the arguments of a message's calls."""
    return [call["function"]["arguments"].split('"')[3] for call in message.get("tool_calls", [])]
