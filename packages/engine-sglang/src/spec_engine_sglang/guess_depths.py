"""Note at which depth SGLang's draft guessed each token, by functions hooked into SGLang's scheduler.

SGLang sends ``Req.customized_info``, lists with a value for each token of an answer, together with the tokens
(0.5.16 and 0.5.23).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spec_engine_sglang.request_names import GENERATED

_KEY = "spec_guess_depths"


class TokenDepths(list[int]):
    """The depths of an answer's tokens so far; a slice has 0 for tokens after the last verification.

    Such tokens come from a prefill, of the prompt or of a request that was retracted.
    """

    def __getitem__(self, place: Any) -> Any:
        """Return the depth at an index, or the depths of all tokens of a slice."""
        if not isinstance(place, slice):
            return super().__getitem__(place)
        missing = max(0, (place.stop or 0) - len(self))
        return ([*self] + [0] * missing)[place]


def begin_answer(result: None, request: Any, *args: Any, **kwargs: Any) -> None:
    """Begin to note the depths of an answer to this engine; SGLang's hook calls this after ``Req.__init__``."""
    if (request.rid or "").startswith(GENERATED):
        request.customized_info = {_KEY: TokenDepths()}


def note_verification(result: None, request: Any, num_correct_drafts: int) -> None:
    """Note the depths of the tokens that a verification yields: the accepted guesses, and the token after them.

    SGLang's hook calls this after ``Req.update_spec_correct_drafts_histogram``, before it appends the tokens.
    """
    depths = (request.customized_info or {}).get(_KEY)
    if depths is not None:
        depths += [0] * (len(request.output_ids) - len(depths))
        depths += range(1, num_correct_drafts + 2)


def note_cap(result: None, request: Any, cap_len: int) -> None:
    """Note that only the first ``cap_len`` - 1 guesses of the latest verification were verified.

    SGLang's hook calls this after ``Req.update_spec_cap_lens_histogram``, which DSpark's draft calls.
    """
    depths = (request.customized_info or {}).get(_KEY)
    if depths and depths[-1] >= cap_len:
        depths[-1] = 0


def answer_depths(about: dict[str, Any], num_tokens: int) -> Sequence[int]:
    """Return the depths of an answer's tokens from SGLang's ``meta_info``; empty if it does not have them all.

    The depth of a token that follows a round's last guess is larger than the number of guesses.
    """
    depths = about.get(_KEY) or ()
    return depths if len(depths) == num_tokens else ()
