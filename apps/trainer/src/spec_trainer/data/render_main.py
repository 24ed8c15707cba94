"""This program is the child of a RenderProcess: ``python -m spec_trainer.data.render_main FD PARENT``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from spec_core import Message
from spec_core.foreign import cause
from spec_core.wording import shortened
from spec_processes import channel_to_parent
from spec_trainer.data.kernel_limits import address_space
from spec_trainer.data.rendering_limits import OutOfTime, rendering_limits

_PROBLEM = 500
"""Largest number of characters of the description of a problem, which a template may write."""


def main() -> None:
    """Answer every request until the parent process closes its socket."""
    channel = channel_to_parent(*sys.argv[-2:])
    import transformers.utils.chat_template_utils  # noqa: F401 (before a limit counts)

    own_bytes = address_space()  # once: what a rendering leaves behind gives the next one no more memory
    channel.send("ready")
    for request in channel.messages():
        channel.send(**_answer(request, own_bytes))


def _answer(request: Message, own_bytes: int) -> dict[str, Any]:
    try:
        with rendering_limits(request["seconds"], own_bytes + request["bytes"]):
            return _rendered(request["arguments"], request["characters"])
    except OutOfTime as error:
        return {"kind": "over", "problem": str(error)}
    except MemoryError:
        return {"kind": "over", "problem": f"it takes more than {request['bytes'] >> 20} MiB of memory"}


def _rendered(arguments: Mapping[str, Any], characters: int) -> dict[str, Any]:
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        texts, marks = render_jinja_template(**arguments)
    except TemplateSyntaxError as error:
        return {
            "kind": "unreadable",
            "line": error.lineno,
            "problem": shortened(error.message or "", _PROBLEM),
        }
    except MemoryError:
        raise
    # A template's raise_exception and its operations on odd values raise errors of any type.
    except Exception as error:  # noqa: BLE001
        return {"kind": "refused", "problem": shortened(cause(error), _PROBLEM)}
    text = texts[0]
    spans = [span for span in marks[0] if span[0] < span[1]] if marks else []
    if len(text) > characters:
        return {"kind": "over", "problem": f"it makes {len(text)} characters, expected at most {characters}"}
    return {"kind": "rendered", "text": text, "marks": spans}


if __name__ == "__main__":
    main()
