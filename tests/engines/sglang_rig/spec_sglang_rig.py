"""Test rig, loaded by every process of SGLang as one of its plugins.

Each line of the file named by SPEC_TEST_SWAPS is one exchange of a draft's weights: digests of every tensor of the
target, and of both copies of the draft, before and after it. While ``PATH.off`` exists nothing is noted, so that
pauses can be measured. Each line of the file named by SPEC_TEST_DRAFTS is one call of an autoregressive drafter or
of DSpark's drafter: the guesses of each request. In the folder named by SPEC_TEST_STREAMS the frontend opens streams
about its requests (``spec_rig_streams``).
"""

import json
import os
import sys
from pathlib import Path


def install() -> None:
    if "SPEC_TEST_SWAPS" in os.environ:
        _watch_exchanges(Path(os.environ["SPEC_TEST_SWAPS"]))
    if "SPEC_TEST_DRAFTS" in os.environ:
        _note_guesses(Path(os.environ["SPEC_TEST_DRAFTS"]))
    if "SPEC_TEST_STREAMS" in os.environ:
        _stream_to_clients(Path(os.environ["SPEC_TEST_STREAMS"]))


def _note_guesses(notes: Path) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def note(result, worker, *args, **kwargs) -> None:
        verified = result[0] if isinstance(result, tuple) else result
        rounds = verified.draft_token.view(-1, worker.speculative_num_draft_tokens)
        with notes.open("a") as lines:  # the first of each is the last known token
            lines.write(json.dumps(rounds[:, 1:].tolist()) + "\n")

    def note_block(proposal, *args, **kwargs) -> None:
        with notes.open("a") as lines:
            lines.write(json.dumps(proposal.draft_block.draft_tokens.tolist()) + "\n")

    eagle = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.draft"
    HookRegistry.register(eagle, note, HookType.AFTER)
    if "DSPARK" in sys.argv:
        dspark = "sglang.srt.speculative.dspark_components.dspark_draft.DraftBlockProposer.propose"
        HookRegistry.register(dspark, note_block, HookType.AFTER)


def _watch_exchanges(notes: Path) -> None:
    from spec_kit.weight_sync import ExchangedSlot, tensors_digest

    swap = ExchangedSlot.swap

    def digests(slot):
        of_target = tensors_digest(slot._target.state_dict().items())
        copies = {copy: tensors_digest(slot.tensors(copy).items()) for copy in ("live", "spare")}
        return {"target": of_target, **copies}

    def watched(self) -> None:
        if notes.with_suffix(".off").exists():
            swap(self)
            return
        before = digests(self)
        swap(self)
        with notes.open("a") as lines:
            lines.write(json.dumps([before, digests(self)]) + "\n")

    ExchangedSlot.swap = watched


def _stream_to_clients(folder: Path) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from spec_rig_streams import Streams

    streams = Streams(folder)

    async def streamed(generate, manager, request, *args, **kwargs):
        streams.open()
        told = 0
        if request.stream:
            streams.tell(request.rid, 0)
        async for part in generate(manager, request, *args, **kwargs):
            if request.stream:
                count = part["meta_info"]["completion_tokens"]
                streams.tell(request.rid, count - told)
                told = count
            yield part

    name = "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request"
    HookRegistry.register(name, streamed, HookType.AROUND)
