"""ChatConfig has the settings by which conversations become text; drafts and answers store them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Self

import pydantic

from spec_core import Config, foreign_errors, read_json_object
from spec_core.errors import ArtifactError, ConfigError
from spec_core.foreign import read_bytes
from spec_core.wording import shown

_RECORD = "chat.json"
"""File in a draft's folder; engines ignore it, because they read only config.json and tensors."""
_TEMPLATE_BYTES = 1 << 20
_RESERVED = {
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "conversations", "documents",
    "messages", "return_assistant_tokens_mask", "tokenize", "tools",
}  # fmt: skip


def _text_of(template: str) -> str:
    """Return the template in the file ``template``, or ``template`` itself if it has Jinja brackets."""
    if "{{" in template or "{%" in template:
        return template
    file = Path(template).expanduser()
    if not file.is_file():
        raise ValueError(f"{shown(template)} is neither a file nor a Jinja template")
    with foreign_errors(ConfigError, f"data.chat_template: {shown(template)} cannot be read"):
        text = read_bytes(file, ConfigError, _TEMPLATE_BYTES).decode()
    if "{{" not in text and "{%" not in text:
        raise ValueError(f"{shown(template)} holds no Jinja template")
    return text


class ChatConfig(Config):
    """The keys of section ``data`` that decide how conversations become text."""

    chat_template: Annotated[str, pydantic.AfterValidator(_text_of)] | None = None
    """A file with a Jinja chat template, or the template itself; by default the target's own. ``config.yaml``
    stores the template's text."""
    chat_template_kwargs: dict[str, Any] = pydantic.Field(default_factory=dict)
    """Variables of the chat template, as servers take them: ``{enable_thinking: false}``."""

    @pydantic.field_validator("chat_template_kwargs")
    @classmethod
    def _no_reserved_names(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in sorted(_RESERVED & value.keys()):
            raise ValueError(f"{name!r} is no variable of a template's own; remove it")
        return value

    def record(self) -> dict[str, Any]:
        """Return the chat template and its variables as a JSON-serializable dict.

        Other keys, which a subclass may have, are left out.
        """
        return {name: getattr(self, name) for name in ChatConfig.model_fields}

    def check_same(self, made: ChatConfig, what: str) -> None:
        """Raise ConfigError if these settings differ from ``made``, with which other text was rendered.

        ``what`` names that text in the error message.
        """
        for name, value in made.record().items():
            here = getattr(self, name)
            if here != value:
                raise ConfigError(
                    f"{what} was made with data.{name}={_shown(value)}, here it is {_shown(here)}, which may give "
                    f"other tokens; set data.{name} as it was"
                )

    def completed_by(self, made: ChatConfig | None, what: str) -> Self:
        """Return these settings; settings that were not given here are taken from ``made``.

        ``made``: the settings with which other text was rendered; None changes nothing. Raise ConfigError if
        a setting that was given here differs from ``made``. ``what`` names the other text in the error
        message.
        """
        if made is None:
            return self
        completed = self.model_copy(
            update={name: value for name, value in made.record().items() if name not in self.model_fields_set}
        )
        completed.check_same(made, what)
        return completed


class PromptConfig(ChatConfig):
    """The keys of section ``data`` that decide how rows become prompts."""

    media_root: Annotated[str, pydantic.Field(min_length=1)] | None = None
    """Folder of the images that rows name by path; files outside it are not read, also not through a link."""


def _shown(value: object) -> str:
    return "null (the target's own)" if value is None else shown(value)


def write_chat_record(folder: Path, chat: ChatConfig) -> None:
    """Write the chat settings of a draft's training data into the draft's folder."""
    (folder / _RECORD).write_text(json.dumps(chat.record(), indent=2) + "\n")


def read_chat_record(folder: Path) -> ChatConfig | None:
    """Return the chat settings in a draft's folder; None if the folder has no chat settings."""
    file = folder / _RECORD
    return _recorded(file, read_json_object(file, ArtifactError)) if file.exists() else None


def chat_of_answers(file: Path) -> ChatConfig | None:
    """Return the chat settings with which ``spec-trainer regenerate`` wrote ``file``, or None."""
    meta = meta_of_answers(file)
    settings = read_json_object(meta, ArtifactError).get("settings") if meta.is_file() else None
    return _recorded(meta, settings) if isinstance(settings, dict) else None


def meta_of_answers(file: Path) -> Path:
    """Return the path at which ``spec-trainer regenerate`` saves the settings of the answers in ``file``."""
    return file.parent / f"{file.name}.meta.json"


def _recorded(file: Path, fields: Any) -> ChatConfig:
    with foreign_errors(ArtifactError, f"{file} is damaged"):
        return ChatConfig(**{name: fields[name] for name in ChatConfig.model_fields if name in fields})
