"""Find what the target generated in a conversation, and the context in which a server had it generate that.

A server renders the messages before an answer with the generation prompt; the target goes on from there. The
conversation up to the answer, rendered with the answer as the last message, shows what it generated: everything after
the text that the server saw, up to the end-of-turn token. So no other message's text can be in it.

Some templates render an answer differently once other messages follow it: they drop its reasoning, move the results
of its calls into it, or use another end-of-turn token. Then the conversation up to a later answer does not begin with
what was seen and generated at the earlier one, and each of the two is a sample of its own.

In some templates the conversation up to an answer does not begin with what the server saw, such as with a prompt that
has an empty thought where the history has none. Then the answer's own text is found by comparing renderings that
differ in a placeholder, and is appended to what the server saw.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from spec_trainer.data.end_of_turn import EndTokens
from spec_trainer.data.frames import KnownTurns, frames_of
from spec_trainer.data.layout import PLACEHOLDER, Layout, Message, Render, shared

PROMPT_ROLES = ("system", "developer")
"""Roles of messages that ask nothing."""
_MOST = 200
"""Largest number of turns of one conversation that are searched each by itself; the time is quadratic in the
conversation's length."""
_REASONING = ("reasoning", "reasoning_content", "thinking")
_THOUGHT = re.compile(r"\s*<think>.*?</think>\s*", re.DOTALL)
_CLOSED = re.compile(r"(?:</[^<>]*>|\[/[^\[\]]*\]|<[^<>|]+\|>)\s*\Z")
"""A text that ends with a closing tag: ``</think>``, ``[/THINK]``, ``<channel|>``."""
_EMPTY_THOUGHT = re.compile(r"([<\[])([\w:]*(?:think|thought)[\w:]*)([>\]])\s*\1/\2\3\s*", re.IGNORECASE)
_OPENED = re.compile(r"[<\[][\w:]+[>\]]\s*\Z")


@dataclass(frozen=True)
class Turn:
    """An answer in the context in which it was generated."""

    text: str
    """A rendering that begins with what the server saw and what the target generated."""
    start: int
    """Number of characters that the server saw."""
    stop: int
    """End of what the target generated."""
    messages: Sequence[Message]
    """The conversation up to this answer."""
    moved: int = 0
    """Number of characters by which ``generated`` lies further back in ``text`` than in the rendering of
    ``messages``."""

    @property
    def generated(self) -> str:
        """The text that the target generated."""
        return self.text[self.start : self.stop]

    @property
    def after(self) -> str:
        """The conversation up to this answer: what the server saw, and what the target generated."""
        return self.text[: self.stop]


@dataclass(frozen=True)
class TurnFinder:
    """Finds the assistant turns of one conversation."""

    messages: Sequence[Message]
    whole: str
    """The whole conversation, rendered."""
    render: Render
    layout: Layout
    end_tokens: EndTokens
    usual: KnownTurns = field(default_factory=KnownTurns)
    """Distances that example conversations with the same template show."""

    def turns(self, indices: Sequence[int]) -> Iterator[Turn | None]:
        """Yield the turn of each answer at ``indices``, ascending; None if it is not certain."""
        frames = frames_of(self.messages, self.whole, self.render) if len(indices) > 1 else {}
        known = dict(self.usual)
        searched = 0
        for index in indices:
            # A content that ends as a turn does, or holds such an end, may end the turn.
            content = self.messages[index].get("content") or ""
            ends = self.end_tokens.ends(content) or self._holds_end(self.messages[index])
            frame = None if ends else frames.get(index)
            if frame and (span := frame.turn(known)):
                yield Turn(self.whole, *span, self.messages[: index + 1])
                continue
            searched += 1
            turn = self.turn(index) if searched <= _MOST else None
            if frame and turn:
                in_place = self.whole.startswith(turn.after)
                known[frame.around] = frame.distances((turn.start, turn.stop)) if in_place else None
            yield turn

    def known(self, indices: Sequence[int]) -> KnownTurns:
        """Return what the turns at ``indices`` show about turns with the same text around them."""
        known: KnownTurns = {}
        for index, frame in frames_of(self.messages, self.whole, self.render).items():
            if index in indices and (turn := self.turn(index)) and self.whole.startswith(turn.after):
                known[frame.around] = frame.distances((turn.start, turn.stop))
        return known

    def turn(self, index: int) -> Turn | None:
        """Return the turn of the answer ``messages[index]``; None if it is not certain."""
        asked = self.messages[:index]
        answer = self.messages[index]
        seen = self._seen(asked)
        turn = self._in_history(asked, answer) if seen is None else self._after(seen, asked, answer)
        turn = self._closed(turn) if turn else None
        is_asked = any(message["role"] not in PROMPT_ROLES for message in asked)
        return turn if turn and (is_asked or self._is_as_replied(turn)) else None

    def is_written(self, turn: Turn) -> bool:
        """Return whether the template writes the turn's text or, if it has calls of tools, these.

        If it left out a call, the draft would learn an end of turn in its place.
        """
        *asked, answer = turn.messages
        calls = answer.get("tool_calls") or ()
        text = str(answer.get("content") or "").strip()
        if not calls and (not text or text not in turn.generated):
            other = self.render([*asked, {**answer, "content": PLACEHOLDER}], False) or ""
            return PLACEHOLDER in other and bool(turn.generated.strip())
        names = [(call.get("function") or call).get("name") for call in calls if isinstance(call, dict)]
        if all(isinstance(name, str) and name in turn.generated for name in names):
            return bool(turn.generated.strip())
        without = {key: value for key, value in answer.items() if key != "tool_calls"}
        return self.render([*asked, without], False) != self._answered(asked, answer)

    def _closed(self, turn: Turn) -> Turn:
        """Return the turn up to its end-of-turn token, without an empty thought that the template writes."""
        stop = len(turn.text.removesuffix(self.layout.trailing))
        stop = self.end_tokens.close(turn.text, turn.start, stop, self.layout.end)
        turn = self._ended(_without_empty_thought(replace(turn, stop=stop)))
        # A target stops at its first end token, such as one that another program has appended to the content.
        holds = self._holds_end(turn.messages[-1])
        at = turn.text.find(self.layout.end, turn.start, turn.stop) if holds else -1
        return turn if at < 0 else replace(turn, stop=at + len(self.layout.end))

    def _holds_end(self, answer: Message) -> bool:
        """Return whether a text of the answer holds the token that ends an answer."""
        texts = (answer.get(key) for key in ("content", *_REASONING))
        end = self.layout.end
        return end != "" and any(isinstance(text, str) and end in text for text in texts)

    def _is_as_replied(self, turn: Turn) -> bool:
        """Return whether the template writes an answer before any question as it does after a question.

        No server generated it, so only this shows which text a target would generate.
        """
        *prompts, answer = turn.messages
        asked = [*prompts, {"role": "user", "content": "x"}]
        messages = [*asked, answer]
        finder = replace(self, messages=messages, whole=self.render(messages, False))
        replied = finder._in_history(asked, answer)
        return replied is not None and finder._closed(replied).generated.endswith(turn.generated)

    def _seen(self, asked: Sequence[Message]) -> str | None:
        """Return the text that a server gave to the target; None if the template rejects it."""
        text = self.render(asked, True) if asked else None  # no server asks for an answer to nothing
        return text if text is None or self.layout.has_prompt else text + self.layout.header

    def _after(self, seen: str, asked: Sequence[Message], answer: Message) -> Turn | None:
        """Return the turn that follows the text ``seen``; None if its borders cannot be found."""
        if _continues(seen, asked[-1]):
            return None
        # A server with thinking off did not have the target generate the reasoning.
        closed = _CLOSED.search(seen[-100:]) and _CLOSED.search(self._prompt(seen, asked))
        thoughtless = [_without_reasoning(answer)] if closed else []
        for candidate in (answer, *thoughtless):
            text = self._answered(asked, candidate)
            if text is None or not text.startswith(seen):
                continue
            # Without a generation prompt, the text before the answer may end anywhere.
            generated = text[len(seen) :]
            certain = self.layout.has_prompt and not _holds_text_of(asked, generated)
            if certain or self._is_alone(asked, candidate, generated):
                return Turn(text, len(seen), len(text), [*asked, candidate])
        return self._composed(seen, asked, [answer, *thoughtless][-1])

    def _prompt(self, seen: str, asked: Sequence[Message]) -> str:
        """Return the generation prompt at the end of ``seen``."""
        return seen.removeprefix(self.render(asked, False) or seen)

    def _composed(self, seen: str, asked: Sequence[Message], answer: Message) -> Turn | None:
        """Append what the template writes for an answer to what the server saw.

        If the server's prompt opens a thought and the template shows none, the answer follows the prompt without
        the opening, as in the history: the draft must not learn the answer as a part of a thought.
        """
        if (turn := self._in_history(asked, answer)) is None:
            return None
        prompt = self._prompt(seen, asked)
        opened = prompt.removeprefix(self.layout.header)
        start = turn.start
        generated = turn.text[start:]
        if opened and generated.startswith(opened):
            start += len(opened)
        elif opened != prompt and not _CLOSED.search(opened) and not _EMPTY_THOUGHT.match(opened + generated):
            seen = seen.removesuffix(opened)
        moved = len(seen) - start
        return replace(turn, text=seen + turn.text[start:], start=len(seen), moved=moved)

    def _in_history(self, asked: Sequence[Message], answer: Message) -> Turn | None:
        """Return the turn as the template renders the conversation up to it; None if it is not certain.

        The answer begins behind its header, or where the texts of two answers begin to differ.
        """
        text = self._answered(asked, answer)
        other = self.render([*asked, {"role": "assistant", "content": PLACEHOLDER}], False)
        bare = self.render(asked, False) or ""
        if text is None or other is None:
            return None
        common = shared(text, other.partition(PLACEHOLDER)[0])
        header = self.layout.header
        if self.layout.trailing.strip() and not common.startswith(bare.removesuffix(self.layout.trailing)):
            return None
        at = common.rfind(header, len(shared(bare, common))) if header else -1
        start = len(common) if at < 0 else at + len(header)
        if not self._is_alone(asked, answer, text[start:]):
            return None
        return Turn(text, start, len(text), [*asked, answer])

    def _ended(self, turn: Turn) -> Turn:
        """Return the turn with its end-of-turn token, if the template writes it only before another message.

        Some targets have no token of their own for it: they stop by emitting the next header's first token.
        """
        if self.end_tokens.ends(turn.generated):
            return turn
        index = len(turn.messages)
        following = [*self.messages[index : index + 1], {"role": "user", "content": PLACEHOLDER}][:1]
        text = self.render([*self.messages[:index], *following], False)
        shown = text is not None and text.startswith(turn.after)
        token = self.end_tokens.opening(text[turn.stop :]) if text and shown else self.layout.end
        return replace(turn, text=turn.after + token, stop=turn.stop + len(token))

    def _answered(self, asked: Sequence[Message], answer: Message) -> str | None:
        if answer is self.messages[-1] and len(asked) == len(self.messages) - 1:
            return self.whole
        return self.render([*asked, answer], False)

    def _is_alone(self, asked: Sequence[Message], answer: Message, generated: str) -> bool:
        """Return whether ``generated`` holds no text of the messages before the answer."""
        others = [
            {**message, "content": PLACEHOLDER} if message.get("content") else message for message in asked
        ]
        return (self.render([*others, answer], False) or "").endswith(generated)


def samples_of(turns: Iterable[Turn]) -> Iterator[list[Turn]]:
    """Divide the turns of a conversation into samples.

    Turns share a sample as long as each later one was generated in a context that begins with the earlier one as it
    was generated.
    """
    sample: list[Turn] = []
    for turn in turns:
        if sample and not (turn.start >= sample[-1].stop and turn.text.startswith(sample[-1].after)):
            yield sample
            sample = []
        sample.append(turn)
    if sample:
        yield sample


def _continues(seen: str, last: Message) -> bool:
    """Return whether the target would go on with the answer ``last`` instead of giving another."""
    text = str(last.get("content") or "").strip()
    return last["role"] == "assistant" and text != "" and seen.rstrip().endswith(text)


def _holds_text_of(messages: Sequence[Message], generated: str) -> bool:
    """Return whether a content of a message seems to be in ``generated``; single characters may be by accident."""
    contents = (message.get("content") for message in messages)
    return any(isinstance(text, str) and len(text) > 1 and text.strip() in generated for text in contents)


def _without_reasoning(message: Message) -> dict[str, Any]:
    content = message.get("content")
    left = {key: value for key, value in message.items() if key not in _REASONING}
    return {**left, "content": _THOUGHT.sub("", content, 1)} if isinstance(content, str) else left


def _without_empty_thought(turn: Turn) -> Turn:
    """Return the turn without an empty thought that the template writes.

    A target with reasoning enabled does not emit an empty thought; with reasoning disabled, it is in the prompt.
    """
    opened = _OPENED.search(turn.text, max(0, turn.start - 40), turn.start)  # by the generation prompt
    thought = _EMPTY_THOUGHT.match(turn.text, opened.start() if opened else turn.start, turn.stop)
    own = _EMPTY_THOUGHT.match(str(turn.messages[-1].get("content") or "").lstrip())
    return replace(turn, start=thought.end()) if thought and thought.end() > turn.start and not own else turn
