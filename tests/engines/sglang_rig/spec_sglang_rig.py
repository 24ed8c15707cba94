"""Test rig, loaded by every process of SGLang as one of its plugins: digests of target and draft around each swap.

Each line of the file named by SPEC_TEST_SWAPS is one exchange: digests of every tensor of the target, and of both
copies of the draft, before and after it. While ``PATH.off`` exists nothing is noted, so that pauses can be measured.
"""

from __future__ import annotations

import json
import os
from pathlib import Path


def install() -> None:
    from spec_core.weight_sync import ExchangedSlot, tensors_digest

    notes = Path(os.environ["SPEC_TEST_SWAPS"])
    swap = ExchangedSlot.swap

    def digests(slot):
        of_target = tensors_digest(slot._target.state_dict().items())
        return {"target": of_target, "live": slot.digest("live"), "spare": slot.digest("spare")}

    def watched(self) -> None:
        if notes.with_suffix(".off").exists():
            swap(self)
            return
        before = digests(self)
        swap(self)
        with notes.open("a") as lines:
            lines.write(json.dumps([before, digests(self)]) + "\n")

    ExchangedSlot.swap = watched
