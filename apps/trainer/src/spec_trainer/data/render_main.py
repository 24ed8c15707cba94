"""This program is the child of a RenderProcess: ``python -m spec_trainer.data.render_main FD PARENT``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from spec_core.foreign import cause
from spec_processes import channel_to_parent
from spec_trainer.data.rendering_limits import rendering_limits

if TYPE_CHECKING:
    from spec_core.launcher import Message


def main() -> None:
    """Answer every request until the parent process closes its socket."""
    channel = channel_to_parent(*sys.argv[-2:])
    import transformers.utils.chat_template_utils  # noqa: F401 (before a limit counts)

    channel.send("ready")
    for request in channel.messages():
        channel.send(**_answer(request))


def _answer(request: Message) -> dict[str, Any]:
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        with rendering_limits(request["seconds"], request["bytes"]):
            texts, marks = render_jinja_template(**request["arguments"])
    except TemplateSyntaxError as error:
        return {"kind": "unreadable", "line": error.lineno, "problem": error.message}
    # A template's raise_exception, its operations on odd values and the limits raise errors of any type.
    except Exception as error:  # noqa: BLE001
        return {"kind": "refused", "problem": cause(error)}
    return {"kind": "rendered", "text": texts[0], "marks": marks[0] if marks else []}


if __name__ == "__main__":
    main()
