"""A server's rendering of a conversation: Transformers' own rendering, as vLLM calls it."""

import json
from dataclasses import dataclass, field
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from .conversations import Message, tools

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


@dataclass(frozen=True)
class Answer:
    """One answer of a conversation, as a server gave it."""

    message: Message
    opens: bool
    """Whether nothing comes before it."""
    prompt: str | None
    """Text that the target saw; None if the template refuses the messages before the answer."""
    after: str | None
    """The conversation up to the answer, rendered."""


@dataclass(frozen=True)
class Server:
    """Serves one chat template."""

    template: str = field(repr=False)

    def answers(self, messages: list[Message]) -> dict[int, Answer]:
        """The answers of a conversation by their indices."""
        offered = tools(messages)
        return {
            index: Answer(
                message,
                index == 0,
                self.render(messages[:index], offered, prompt=True),
                self.render(messages[: index + 1], offered),
            )
            for index, message in enumerate(messages)
            if message["role"] == "assistant"
        }

    def render(
        self, messages: list[Message], offered: list[dict] | None = None, *, prompt: bool = False
    ) -> str | None:
        """The text of messages; None if the template refuses them."""
        try:
            texts, _ = render_jinja_template(
                conversations=[[_served(message) for message in messages]],
                tools=offered,
                chat_template=self.template,
                add_generation_prompt=prompt,
                **SPECIAL_TOKENS,
            )
        except Exception:  # noqa: BLE001 (a template raises what it likes)
            return None
        return texts[0]


def _served(message: Message) -> Message:
    return {
        **message,
        "content": message.get("content") or "",
        **(
            {"tool_calls": [_parsed(call) for call in message["tool_calls"]]}
            if "tool_calls" in message
            else {}
        ),
    }


def _parsed(call: dict[str, Any]) -> dict[str, Any]:
    return call | {"function": call["function"] | {"arguments": json.loads(call["function"]["arguments"])}}
