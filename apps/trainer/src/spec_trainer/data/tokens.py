"""Encode parsed rows as token ids and loss masks."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from spec_core import foreign_errors
from spec_core.errors import DataError
from spec_core.foreign import check_regular
from spec_core.records import ImageSource, PromptWithImages
from spec_core.wording import counted, shown
from spec_trainer.base.panics import without_panic_lines
from spec_trainer.configuration.chat import ChatConfig
from spec_trainer.data.chat import ChatRenderer, Rendering
from spec_trainer.data.errors import BadRow, row_errors
from spec_trainer.data.image_parts import count_images
from spec_trainer.data.row_images import NO_IMAGES, ImageRules, RowImages
from spec_trainer.data.rows import Chat, Text, Tokens
from spec_trainer.data.spelling import spelling_problem

logger = logging.getLogger(__name__)

_FILES = (".json", ".jinja", ".model", ".txt", ".tiktoken")
_PROBE = "Zoë's 1st 東京 😀\n"
"""A text that a new tokenizer gets, because a damaged one may panic at its first text instead of when it is read."""
CHARACTERS = 1 << 22
"""Largest number of characters of a text that is encoded; for some tokenizers, each takes 400 bytes of memory."""
_FILE_BYTES = 1 << 30
"""Largest number of bytes of one tokenizer file; tokenizer files of public models have at most some 20 MB."""


@dataclass(frozen=True, eq=False)
class Encoded:
    """The tokens of one row."""

    input_ids: np.ndarray
    """int32 [T]: token ids."""
    loss_mask: np.ndarray
    """bool [T]: whether token i is supervised."""
    images: tuple[ImageSource, ...] = ()
    """Images of the row, in the order of their tokens."""
    after_images: int = 0
    """Index of the token after the last image; 0 without images."""
    notes: tuple[str, ...] = ()
    """Remarks about the row for the data report (``Rendering.notes``)."""


@dataclass(frozen=True, eq=False)
class Opening:
    """The context of an answer: the conversation before it, rendered with the generation prompt."""

    text: str
    input_ids: list[int]
    offsets: np.ndarray
    """int [T, 2]: start and end of each token in ``text``, in characters."""
    images: tuple[ImageSource, ...] = ()
    """Images of the conversation, in the order of their tokens."""

    @property
    def prompt(self) -> Sequence[int]:
        """The prompt for an engine: the token ids, with the images if there are any."""
        return prompt_of(self.input_ids, self.images)


def prompt_of(ids: Sequence[int], images: tuple[ImageSource, ...]) -> Sequence[int]:
    """Return a prompt for an engine: its token ids, with its images if there are any."""
    return PromptWithImages(tuple(ids), images) if images else ids


class Encoder:
    """Encodes rows with the target's tokenizer, which is loaded when the first row needs it."""

    def __init__(
        self,
        folder: Path,
        vocab_size: int,
        chat: ChatConfig | None = None,
        images: ImageRules = NO_IMAGES,
        media_root: str | None = None,
    ) -> None:
        """Encode with the tokenizer in ``folder``; ``chat`` says how conversations become text.

        ``images``: the tokens that represent images, and whether rows may have images. ``media_root``: folder of
        images that rows name by path.
        """
        self._folder = folder
        self.images = images
        self._row_images = RowImages(media_root, folder)
        self._vocab_size = vocab_size
        self._chat_config = chat or ChatConfig()

    @property
    def chat_template_kwargs(self) -> dict[str, Any]:
        """Variables of the chat template."""
        return self._chat_config.chat_template_kwargs

    def encode(self, row: Chat | Text | Tokens, last_turn_only: bool) -> list[Encoded]:
        """Return the tokens and loss masks of a row's samples. Raise BadRow if the row cannot be used.

        ``last_turn_only`` applies to rows that do not set this flag.
        """
        self._check_variables(row)
        if isinstance(row, Text):
            return [self._encoded(*self._text(row), row, ())]
        last = last_turn_only if row.last_turn_only is None else row.last_turn_only
        if isinstance(row, Tokens):
            return [self._encoded_tokens(self._checked(row.input_ids), _token_mask(row, last), row)]
        return [self._encoded_chat(rendering, row) for rendering in self._renderer.render(row, last)]

    def _encoded_chat(self, rendering: Rendering, row: Chat) -> Encoded:
        encoded = self._encoded(*self._chat(rendering), row, row.images[: rendering.num_images])
        return replace(encoded, notes=rendering.notes)

    def _encoded(
        self, ids: np.ndarray, mask: np.ndarray, row: Chat | Text, references: Sequence[Any]
    ) -> Encoded:
        ids = self._checked(ids)
        images, counts = self._images(ids, row, references)
        if not images:
            return Encoded(ids, mask)
        mask = mask & (ids != self.images.token_id)
        after = int(np.cumsum(counts)[ids == self.images.token_id][-1])
        return Encoded(self._repeated(ids, counts), np.repeat(mask, counts), images, after)

    def _encoded_tokens(self, ids: np.ndarray, mask: np.ndarray, row: Tokens) -> Encoded:
        """Encode a tokenised row; it must already have as many image tokens as its images need.

        Raise BadRow if it has more or fewer, or if an image cannot be used.
        """
        images = self._images_of_tokens(ids, row)
        if not images:
            return Encoded(ids, mask)
        return Encoded(ids, mask & (ids != self.images.token_id), images, self._after_images(ids))

    def _images_of_tokens(self, ids: np.ndarray, row: Tokens) -> tuple[ImageSource, ...]:
        """Return the images of a tokenised row.

        Raise BadRow if ``ids`` has more or fewer image tokens than the images need.
        """
        num_tokens = 0 if self.images.token_id is None else int((ids == self.images.token_id).sum())
        found = self._row_images.read(row.images) if self.images.token_id is not None else []
        wanted = sum(count for _, count in found)
        if num_tokens != wanted:
            raise BadRow(
                "bad image",
                f"{counted(len(found), 'image')} of {counted(wanted, 'token')}, but input_ids has the image token "
                f"{self.images.token_id} {counted(num_tokens, 'time')}",
            )
        return tuple(source for source, _ in found)

    def _after_images(self, ids: np.ndarray) -> int:
        """Return the index of the token after the last image and after its closing token, if it has one."""
        last = int(np.flatnonzero(ids == self.images.token_id)[-1])
        return last + (1 if self.images.ends is None else 2)

    def _repeated(self, ids: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Return ``ids`` with token i repeated ``counts[i]`` times.

        If the target has tokens that enclose an image, the first and the last token of each image are
        replaced by them.
        """
        long = np.repeat(ids, counts)
        if self.images.ends is not None:
            places = ids == self.images.token_id
            stops = np.cumsum(counts)[places]
            long[stops - counts[places]], long[stops - 1] = self.images.ends
        return long

    def _images(
        self, ids: np.ndarray, row: Chat | Text | Tokens, references: Sequence[Any]
    ) -> tuple[tuple[ImageSource, ...], np.ndarray]:
        """Return the images of a row, and how many times to repeat each token of ``ids``, int [T].

        The chat template writes the image token once for each image. The target needs it once for each embedding of
        the image, and one more for each of the two tokens that enclose an image, if the target has them. Raise BadRow
        if images and image tokens do not match, or if an image cannot be used.
        """
        counts = np.ones(len(ids), dtype=np.int64)
        if self.images.token_id is None:
            return (), counts
        places = np.flatnonzero(ids == self.images.token_id)
        if len(places) != len(references) or (references and self._names_image_token(row)):
            raise BadRow(
                "bad image",
                f"{counted(len(references), 'image')}, but the row has the image token {self.images.token_id} "
                f"{counted(len(places), 'time')}: texts must not hold this token, "
                "and the chat template must write it once for each image",
            )
        if references:
            found = self._row_images.read(references)
            ends = self.images.ends or ()
            counts[places] = [num_tokens + len(ends) for _, num_tokens in found]
            return tuple(source for source, _ in found), counts
        return (), counts

    def _names_image_token(self, row: Chat | Text | Tokens) -> bool:
        """Return whether a text of the conversation contains the image token as text."""
        token = self._tokenizer.convert_ids_to_tokens(self.images.token_id)
        return isinstance(row, Chat) and token in json.dumps(row.messages, ensure_ascii=False, default=str)

    def prompt(self, row: Chat | Text | Tokens) -> Sequence[int]:
        """Return the prompt of a row for an engine: token ids, with images if there are any.

        A conversation's prompt is everything before the last answer, with the generation prompt. A tokenised row's
        prompt is all tokens before the last supervised span, or all tokens if none come before it. A text's prompt is
        all tokens. Raise BadRow if the row cannot be used.
        """
        self._check_variables(row)
        if isinstance(row, Text):
            ids, _ = self._text(row)
        elif isinstance(row, Chat):
            before = row.messages[: row.answers[-1]] if row.answers else row.messages
            return self.opening(row, before).prompt
        else:
            return self._prompt_of_tokens(row)
        ids = self._checked(ids)
        self._images(ids, row, ())
        return ids.tolist()

    def _prompt_of_tokens(self, row: Tokens) -> Sequence[int]:
        start = int(last_run(row.loss_mask).argmax())
        ids = self._checked(row.input_ids)
        images = self._images_of_tokens(ids, row)
        prompt = ids[: start or None]
        if images and self._after_images(ids) > len(prompt):
            raise BadRow("bad image", "the row has an image behind the tokens to be answered")
        return prompt_of(prompt.tolist(), images)

    def image_sources(self, references: Sequence[Any]) -> tuple[ImageSource, ...]:
        """Return the checked sources of images. Raise BadRow if an image cannot be used."""
        return tuple(source for source, _ in self._row_images.read(references))

    def opening(self, chat: Chat, messages: Sequence[dict[str, Any]]) -> Opening:
        """Return ``messages`` with the generation prompt, rendered with the tools and variables of ``chat``.

        The messages must be the first messages of ``chat``; only answers may differ. So they have the first images of
        ``chat``. Raise BadRow if they cannot be encoded.
        """
        self._check_variables(chat)
        text = self._renderer.opening(chat, messages)
        ids, offsets = self._rendered(text)
        ids = self._checked(ids)
        images, counts = self._images(ids, chat, chat.images[: count_images(messages)])
        return Opening(text, self._repeated(ids, counts).tolist(), np.repeat(offsets, counts, axis=0), images)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, special tokens included."""
        return self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)

    def _check_variables(self, row: Chat | Text | Tokens) -> None:
        """Raise BadRow if the row specifies other template variables than the configuration."""
        named = None if isinstance(row, Text) else row.chat_template_kwargs
        if named and named != self.chat_template_kwargs:
            raise BadRow(
                "other variables of the template",
                f"the row's are {shown(named)}, data.chat_template_kwargs is {shown(self.chat_template_kwargs)}",
            )

    def _tokenize(self, text: str, **options: bool) -> Any:
        tokenizer = self._tokenizer
        if len(text) > CHARACTERS:
            raise BadRow(
                "text too long",
                f"{len(text)} characters, expected at most {CHARACTERS}; cut the row into several",
            )
        with row_errors("refused by the tokenizer"):
            return tokenizer(text, verbose=False, **options)

    def _checked(self, ids: np.ndarray) -> np.ndarray:
        outside = (ids < 0) | (ids >= self._vocab_size)
        if outside.any():
            detail = f"id {ids[outside][0]}, the target's vocabulary has {self._vocab_size}"
            if "_tokenizer" in self.__dict__:  # else the row has come with its ids
                detail += f"; the tokenizer in '{self._folder}' may be another model's"
            raise BadRow("token outside the vocabulary", detail)
        return ids.astype(np.int32)

    def _text(self, row: Text) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and mask of a text, with the tokenizer's special tokens; all tokens are supervised.

        A text that another program rendered may have these special tokens already, and gets no second ones.
        """
        ids = self._tokenize(_unicode(row.text), add_special_tokens=False)["input_ids"]
        before, after = self._added_tokens
        ids = ids if ids[: len(before)] == before else before + ids
        ids = ids if ids[len(ids) - len(after) :] == after else ids + after
        return np.asarray(ids, dtype=np.int64), np.ones(len(ids), dtype=bool)

    @cached_property
    def _added_tokens(self) -> tuple[list[int], list[int]]:
        """The special tokens that the tokenizer adds before and after a text."""
        own, whole = (self._tokenize("x", add_special_tokens=added)["input_ids"] for added in (False, True))
        start = next((i for i in range(len(whole)) if whole[i : i + len(own)] == own), 0)
        return whole[:start], whole[start + len(own) :]

    def _chat(self, rendering: Rendering) -> tuple[np.ndarray, np.ndarray]:
        ids, offsets = self._rendered(rendering.text)
        mask = np.zeros(len(ids), dtype=bool)
        for start, stop in rendering.spans:
            chosen = token_range(offsets, start, stop)
            if problem := spelling_problem(self._tokenizer, ids[chosen].tolist(), rendering.text[start:stop]):
                raise BadRow(problem, f"characters {start} to {stop} of the rendered conversation")
            mask[chosen] = True
        return ids, mask

    def _rendered(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the token ids of rendered text, [T], and where each token is in the text, [T, 2].

        The tokenizer adds no special tokens. Positions are in characters.
        """
        encoding = self._tokenize(_unicode(text), add_special_tokens=False, return_offsets_mapping=True)
        ids = np.asarray(encoding["input_ids"], dtype=np.int64)
        return ids, np.asarray(encoding["offset_mapping"]).reshape(-1, 2)

    @cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        logger.debug("loading the tokenizer in %s", self._folder)
        problem = f"the tokenizer in '{self._folder}' cannot be read"
        with foreign_errors(DataError, problem), without_panic_lines():
            tokenizer_files(self._folder)  # transformers opens whatever has such a name
            # Without trust_remote_code, transformers asks on stdin whether it may run the target's Python.
            tokenizer = AutoTokenizer.from_pretrained(
                str(self._folder), local_files_only=True, trust_remote_code=False
            )
            with suppress(Exception):  # a text that it does not know is a row's matter, a panic is not
                tokenizer(_PROBE)
            return tokenizer

    @cached_property
    def _renderer(self) -> ChatRenderer:
        if not self._tokenizer.is_fast:
            raise DataError(
                f"the tokenizer in '{self._folder}' does not give the offsets of its tokens, which conversations "
                "need: save it with a tokenizer.json, or give rows of input_ids with loss_mask"
            )
        with foreign_errors(DataError, f"the tokenizer in '{self._folder}' cannot be used"):
            return ChatRenderer(self._tokenizer, self._chat_config)


def tokenizer_files(folder: Path) -> list[Path]:
    """Return all files that a tokenizer may read. Raise DataError for a pipe, a device or a huge file."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in _FILES and path.exists())
    files = [path for path in files if not path.is_dir()]
    for file in files:
        check_regular(file, DataError, _FILE_BYTES)
    return files


def token_range(offsets: np.ndarray, start: int, stop: int) -> slice:
    """Return the slice of the tokens of the characters ``start`` to ``stop``.

    ``offsets``: int [T, 2], ascending. The slice goes from the first to the last token that overlaps these
    characters. Tokens between them are included even with empty offsets, which some tokenizers give to white space.
    """
    first = int(np.searchsorted(offsets[:, 1], start, side="right"))
    last = int(np.searchsorted(offsets[:, 0], stop, side="left"))
    return slice(first, max(first, last))


def last_run(mask: np.ndarray) -> np.ndarray:
    """Return ``mask``, bool [T], with only its last run of true values left."""
    starts = np.flatnonzero(np.diff(mask, prepend=False) & mask)
    start = starts[-1] if len(starts) else 0
    return mask & (np.arange(len(mask)) >= start)


def _token_mask(row: Tokens, last_turn_only: bool) -> np.ndarray:
    return last_run(row.loss_mask) if last_turn_only else row.loss_mask


def _unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRow("not Unicode", f"{error.reason} at character {error.start}") from None
    return text
