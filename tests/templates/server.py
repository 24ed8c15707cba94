"""A server's rendering of a conversation: Transformers' own, of the messages as vLLM gives them to a template.

``tests/engines/test_vllm_templates.py`` compares it with vLLM's.
"""

import json
from dataclasses import dataclass, field
from typing import Any

from jinja2 import nodes
from transformers.utils import chat_template_utils

from .conversations import Message, tools

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


@dataclass(frozen=True)
class Answer:
    """One answer of a conversation, as a server gave it."""

    message: Message
    opens: bool
    """Whether nothing comes before it but a system prompt."""
    prompt: str | None
    """Text that the target saw; None if the template refuses the messages before the answer."""
    after: str | None
    """The conversation up to the answer, rendered."""


@dataclass(frozen=True)
class Server:
    """Serves one chat template."""

    template: str = field(repr=False)
    _in_parts: dict[bool, set[str]] = field(default_factory=dict, repr=False)
    """Roles whose texts the template gets as parts, without and with tools."""

    def answers(self, messages: list[Message]) -> dict[int, Answer]:
        """The answers of a conversation by their indices."""
        offered = tools(messages)
        return {
            index: Answer(
                message,
                all(before["role"] == "system" for before in messages[:index]),
                self.render(messages[:index], offered, prompt=True),
                self.render(messages[: index + 1], offered),
            )
            for index, message in enumerate(messages)
            if message["role"] == "assistant"
        }

    def render(
        self, messages: list[Message], offered: list[dict] | None = None, *, prompt: bool = False
    ) -> str | None:
        """The text of messages; None if the template refuses them.

        A call without text at the end is given no part: with an empty one, a template may write a line break that
        the target did not generate.
        """
        roles = self.roles_in_parts(offered)
        given = [_given(message, roles) for message in messages]
        if messages and not messages[-1].get("content") and "tool_calls" in messages[-1]:
            given[-1]["content"] = ""
        return self._render(given, offered, prompt)

    def roles_in_parts(self, offered: list[dict] | None) -> set[str]:
        """Roles whose texts the template gets as parts: it loops over contents, and writes the text of a part.

        vLLM gives it the texts of all roles as parts then, even if it writes the list itself for some of them.
        """
        if bool(offered) not in self._in_parts:
            found = self._in_parts[bool(offered)] = set()
            for role in ("user", "system", "assistant") if _loops_over_content(self.template) else ():
                probe = [{"role": "user", "content": "x"}, {"role": role, "content": "partmark"}]
                probe = probe[1:] if role == "user" else probe[::-1] if role == "system" else probe
                text = (
                    self._render([_given(message, found | {role}) for message in probe], offered, False) or ""
                )
                found |= {role} if "partmark" in text and "text': 'partmark" not in text else set()
        return self._in_parts[bool(offered)]

    def _render(self, given: list[Message], offered: list[dict] | None, prompt: bool) -> str | None:
        try:
            texts, _ = chat_template_utils.render_jinja_template(
                conversations=[given],
                tools=offered,
                chat_template=self.template,
                add_generation_prompt=prompt,
                **SPECIAL_TOKENS,
            )
        except Exception:  # noqa: BLE001 (a template raises what it likes)
            return None
        return texts[0]


def _given(message: Message, roles: set[str]) -> Message:
    text = message.get("content")
    content = (
        [{"type": "text", "text": text}] if text is not None and message["role"] in roles else text or ""
    )
    calls = (
        {"tool_calls": [_parsed(call) for call in message["tool_calls"]]} if "tool_calls" in message else {}
    )
    thought = {"reasoning_content": message["reasoning"]} if "reasoning" in message else {}
    return message | {"content": content} | calls | thought


def _parsed(call: dict[str, Any]) -> dict[str, Any]:
    return call | {"function": call["function"] | {"arguments": json.loads(call["function"]["arguments"])}}


def _loops_over_content(template: str) -> bool:
    """Whether a template loops over the content of a message, or over a variable or parameter of that name."""
    loops = list(
        chat_template_utils._compile_jinja_template(template).environment.parse(template).find_all(nodes.For)
    )
    names = {"messages"} | {loop.target.name for loop in loops if "messages" in str(_base(loop.iter))}
    return any(_is_content(loop.iter, names) for loop in loops)


def _base(node: nodes.Node) -> nodes.Node:
    """Return the node below filters and slices."""
    while isinstance(node, nodes.Filter) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    return node


def _is_content(node: nodes.Node, names: set[str]) -> bool:
    node = _base(node)
    if isinstance(node, nodes.Name):
        return node.name.endswith("content")
    key = node.attr if isinstance(node, nodes.Getattr) else getattr(getattr(node, "arg", None), "value", None)
    owner = getattr(node, "node", None)
    owner = owner.node if isinstance(owner, nodes.Getitem) else owner
    return key == "content" and isinstance(owner, nodes.Name) and owner.name in names
