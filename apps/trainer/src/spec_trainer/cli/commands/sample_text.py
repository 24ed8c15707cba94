"""Show samples as text with the supervised tokens highlighted, for ``spec-trainer plan --show``."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from spec_core.wording import counted, printable
from spec_trainer.base.colour import green

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from spec_trainer.data.dataset import Sample
    from spec_trainer.data.tokens import Encoder

_HALF_A_CHARACTER = "\ufffd"


def sample_texts(samples: Sequence[Sample], encoder: Encoder) -> list[dict[str, Any]]:
    """Return samples as text, in JSON-serializable dicts. Raise DataError if the target has no tokenizer.

    Each dict is {"where", "tokens", "supervised_tokens", "parts": [{"text", "supervised"}, …]}.
    """
    return [
        {
            "where": sample.where,
            "tokens": len(sample),
            "supervised_tokens": int(sample.loss_mask.sum()),
            "parts": [
                {"text": text, "supervised": supervised} for text, supervised in _parts(sample, encoder)
            ],
        }
        for sample in samples
    ]


def sample_lines(texts: Sequence[Mapping[str, Any]], coloured: bool) -> Iterator[str]:
    """Yield lines for a terminal: supervised text is green, or between [[ and ]] without colours."""
    for text in texts:
        yield ""
        yield f"--- {text['where']}: {text['supervised_tokens']} of {counted(text['tokens'], 'token')} supervised"
        yield "".join(
            printable(part["text"]) if not part["supervised"] else _marked(printable(part["text"]), coloured)
            for part in text["parts"]
        )


def _marked(text: str, coloured: bool) -> str:
    return green(text) if coloured else f"[[{text}]]"


def _parts(sample: Sample, encoder: Encoder) -> Iterator[tuple[str, bool]]:
    """Divide a sample into runs of tokens that are all supervised or all not; yield each run's text.

    With each text comes whether it is supervised. A run is decoded together with all earlier tokens, because
    some tokenizers put a space before every word except the first.
    """
    ids = sample.input_ids.tolist()
    whole = encoder.decode(ids)
    start = 0
    stop = 0
    for supervised, tokens in groupby(sample.loss_mask.tolist()):
        stop += len(list(tokens))
        before = encoder.decode(ids[:stop]).rstrip(_HALF_A_CHARACTER)
        end = len(before) if stop < len(ids) else len(whole)
        yield whole[start:end], supervised
        start = max(start, end)
