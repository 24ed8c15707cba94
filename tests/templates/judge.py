"""Compares the samples of a conversation with the requests that a server got for it.

A *break* is what must not be: a text of others is supervised, an answer is not or twice, its context is not what the
server saw, or it ends otherwise than the server's. A *note* is where a row and its template do not agree, so that no
sample could be as a server had it: the row has no thought, but the prompt opens one.
"""

import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from .conversations import MARK, Message, arguments, marks
from .samples import Span, spans
from .server import Answer, Server

THOUGHT = re.compile(
    r"<[^<>]{0,20}think[^<>]{0,20}>|\[/?THINK\]|<\|channel>thought\n<channel\|>|</?thought>", re.IGNORECASE
)
WORDS = re.compile(r"[^\W_]{2,} [^\W_]{2,}")
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PLAIN = [{"role": "user", "content": "user0mark"}, {"role": "assistant", "content": "answer1mark"}]


@dataclass
class Judge:
    """Judges the samples of one conversation under one template."""

    server: Server
    specials: re.Pattern[str]
    """Matches any special token."""
    messages: list[Message]
    breaks: list[str] = field(default_factory=list)
    notes: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.marked = MARKED.search(self.server.template) is not None
        self.answers = self.server.answers(self.messages)
        self.owners = {mark: index for index in self.answers for mark in marks(self.messages[index])}
        self.end = self._usual_end()

    def judge(self, samples: list[list[tuple[bool, str]]]) -> None:
        prompts = [answer.prompt for answer in self.answers.values() if answer.prompt]
        found = [span for sample in samples for span in spans(sample, prompts)]
        count = Counter(mark for span in found for mark in MARK.findall(span.text))
        self.breaks += [f"supervises {mark}" for mark in count if mark not in self.owners]
        own: dict[int, list[Span]] = {index: [] for index in self.answers}
        for span in found:
            if (index := self._owner(span, own)) is not None:
                own[index].append(span)
        for index, answer in self.answers.items():
            self._check_count(answer, count)
            if not self.marked:
                self._check_spans(answer, own[index])

    def _usual_end(self) -> str:
        """The first special token behind a plain answer; empty if there is none."""
        plain = self.server.render(_PLAIN) or ""
        found = self.specials.search(plain.partition("answer1mark")[2])
        return found.group() if found else ""

    def _owner(self, span: Span, own: dict[int, list[Span]]) -> int | None:
        """The index of the answer that a span belongs to: by its texts, or else by the prompt before it.

        If several answers have that prompt, it is the first that has no span in ``own`` yet.
        """
        owners = {self.owners.get(mark) for mark in MARK.findall(span.text)} - {None}
        if len(owners) > 1:
            self.breaks.append(f"one span over the answers {sorted(owners)}")
        if owners or self.marked:
            return owners.pop() if len(owners) == 1 else None
        prompts = {
            index: answer.prompt for index, answer in self.answers.items() if answer.prompt is not None
        }
        same = [index for index, prompt in prompts.items() if prompt == span.before]
        near = [index for index, prompt in prompts.items() if not _difference(prompt, span)[0]]
        if not same + near:
            self.breaks.append(f"supervises {span.text!r} behind {span.before[-60:]!r}")
        return next((index for index in same + near if not own[index]), next(iter(same + near), None))

    def _check_count(self, answer: Answer, count: Counter[str]) -> None:
        """Each text that the server's rendering shows of an answer is supervised once."""
        shown = _shown(answer)
        prompt, after = answer.prompt or "", answer.after or ""
        closed = not after.startswith(prompt) and THOUGHT.search(_tail(prompt))
        written = set(arguments(answer.message)) <= set(shown)
        for mark in shown:
            if count[mark] == 0 and not written:
                self.notes.add("the template does not write the call: the answer is context")
            elif count[mark] == 0 and self.marked:
                self.notes.add("the template does not mark it")
            elif count[mark] == 0 and closed and mark.startswith("thought"):
                self.notes.add("the prompt closes the thought: the row's is left out")
            elif count[mark] == 0 and answer.opens and answer.prompt is None:
                self.notes.add("the template refuses the request: the answer is context")
            elif count[mark] == 0 and answer.opens and not self._opens_as_replied(answer):
                self.notes.add(
                    "an answer before any question is written otherwise than a reply: it is context"
                )
            elif count[mark] != 1:
                self.breaks.append(f"{re.sub(r'[0-9].*', '', mark)} supervised {count[mark]} times")

    def _check_spans(self, answer: Answer, own: list[Span]) -> None:
        if len(own) > 1:
            self.breaks.append(f"an answer in {len(own)} spans")
        elif own and WORDS.search(_tail(own[0].text)):
            self.breaks.append(f"supervises the template's words {_tail(own[0].text)[:60]!r}")
        elif not own and not marks(answer.message):
            self.notes.add("the empty answer is context")
        elif own and answer.opens:
            self._check_opening(answer, own[0])
        elif own and answer.prompt is not None and answer.after is not None:
            self._check_span(answer, own[0], answer.prompt, answer.after)

    def _reply(self, answer: Answer) -> str:
        """An opening answer as a server generates it behind a question; empty if unknown."""
        prompt, after = self.server.render(_PLAIN[:1], prompt=True), self.server.render(_PLAIN)
        if not (prompt and after and after.startswith(prompt)):
            return ""
        return after.removeprefix(prompt).replace("answer1mark", answer.message["content"])

    def _opens_as_replied(self, answer: Answer) -> bool:
        """True if the template writes an opening answer as it writes a reply, and no thought is open but there."""
        reply, after = self._reply(answer), answer.after or ""
        usual = self.server.render(_PLAIN[:1], prompt=True) or ""
        if THOUGHT.search(_tail(usual)) and not THOUGHT.search(_tail(answer.prompt or "")):
            return False
        return (
            reply in after if answer.message is self.messages[0] else after == (answer.prompt or "") + reply
        )

    def _check_opening(self, answer: Answer, span: Span) -> None:
        """An answer that opens a conversation supervises the same text as behind a question."""
        if expected := self._reply(answer):
            text = span.text if self.specials.search(expected) else self.specials.sub("", span.text)
            if _bare(text) not in _bare(expected):
                self.breaks.append(f"an opening answer supervises {text[:60]!r} for {expected[:60]!r}")

    def _check_span(self, answer: Answer, span: Span, prompt: str, after: str) -> None:
        wrong, note = _difference(prompt, span)
        if wrong:
            self.breaks.append(wrong)
            return
        self.notes |= {note} - {""}
        shown = _shown(answer)
        if not shown and not after.startswith(prompt):
            return
        tail = after[max((after.rindex(mark) + len(mark) for mark in shown), default=len(prompt)) :]
        self._check_end(_tail(span.text), tail, bool(shown))
        generated = after.removeprefix(prompt)
        if (
            not note
            and after.startswith(prompt)
            and not generated.startswith(span.text.removesuffix(_tail(span.text)))
        ):
            self.breaks.append(f"supervises {span.text[:60]!r} for {generated[:60]!r}")

    def _check_end(self, end: str, expected: str, shown: bool) -> None:
        """A span ends like the server's rendering: with its end token, or with the next header's first token."""
        stop = next((match for match in self.specials.finditer(end) if match.end() == len(end)), None)
        header = (
            stop and not self.specials.search(expected) and expected.strip() == end[: stop.start()].strip()
        )
        empty = (
            not shown and end.strip() and (end.strip() in expected or self.specials.fullmatch(end.strip()))
        )
        if not (expected.startswith(end) or header or empty):
            self.breaks.append(f"ends with {end[:60]!r} for {expected[:60]!r}")
        elif self.specials.search(expected) and not self.specials.search(end):
            self.breaks.append(f"ends without {expected[:60]!r}")
        elif self.end and self.end in expected and self.end not in end:
            self.breaks.append(f"ends with {end[:60]!r} before {self.end!r}")


def _shown(answer: Answer) -> list[str]:
    return [mark for mark in marks(answer.message) if mark in (answer.after or "")]


def _difference(prompt: str, span: Span) -> tuple[str, str]:
    """How the context of a span differs from what the server saw: (as a break, as a note), empty if not at all."""
    seen = span.before
    if seen == prompt:
        return "", ""
    if prompt.startswith(seen) and span.text.startswith(prompt[len(seen) :]):
        return f"supervises the prompt {prompt[len(seen) :]!r}", ""
    ours, theirs = _tail(seen), _tail(prompt)
    if seen.removesuffix(ours) != prompt.removesuffix(theirs):
        return f"context ends with {seen[-60:]!r} for {prompt[-60:]!r}", ""
    if "".join(ours.split()) == "".join(theirs.split()):
        return "", "white space before the answer is other than in the prompt"
    if _bare(ours) == _bare(theirs):
        return "", "the prompt opens or closes a thought that the row does not have, or the reverse"
    return "", "the template writes something else before an answer than in its prompt"


def _tail(text: str) -> str:
    """The text behind the last text of a message."""
    ends = [match.end() for match in MARK.finditer(text)]
    return text[ends[-1] :] if ends else text


def _bare(text: str) -> str:
    return "".join(THOUGHT.sub("", text).split())


def special_pattern(specials: Collection[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(specials, key=len, reverse=True))))
