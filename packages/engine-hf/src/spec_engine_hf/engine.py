"""HfEngine runs the target in this process with Transformers. It is the reference for other engines."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar, cast

from pydantic import Field

from spec_core import Engine, EngineAbilities, EngineConfig
from spec_core.errors import ConfigError, DeadlineExceeded, EngineError
from spec_core.records import Availability, FeatureSample
from spec_engine_hf.loadable import check_loadable

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from pathlib import Path

    from spec_core import (
        DraftReplica,
        EngineContext,
        FeatureSender,
        FrozenProducts,
        Proposer,
        ServingStatus,
        TargetSpec,
        Transport,
    )
    from spec_core.records import (
        AcceptanceCounters,
        CaptureRequest,
        FeatureSchema,
        Generation,
        GenerationRequest,
        SamplingParams,
    )
    from spec_engine_hf.decoding import Batch, DraftSource
    from spec_kit.weight_sync import UpdateReceiver

R = TypeVar("R")

_SEND_SLICE_S = 1.0


class HfConfig(EngineConfig):
    """Section ``engine`` of a run with Transformers."""

    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Compute dtype of the target. None means the dtype of its stored weights."""
    max_num_seqs: int = Field(32, ge=1)
    """Maximum number of sequences that are decoded at the same time, with a draft or without. They share
    forward passes; when one sequence ends, the next begins."""


class HfEngine(Engine):
    """The engine ``hf``: one worker thread owns the model and runs one call after the other."""

    name: ClassVar[str] = "hf"
    api_version: ClassVar[int] = 1
    Config: ClassVar[type[EngineConfig]] = HfConfig
    abilities: ClassVar[EngineAbilities] = EngineAbilities(
        in_process=True,
        proposers=True,
        fresh_weights=True,
        guess_depths=True,
        stops_early=True,
        images=True,
        image_prompts=True,
    )

    @classmethod
    def probe(cls) -> Availability:
        """Return whether Transformers is installed."""
        return Availability.of_distribution("transformers")

    @classmethod
    def check_target(cls, config: EngineConfig, target: TargetSpec) -> None:
        """Raise TargetError if the installed Transformers cannot load the target."""
        check_loadable(target)

    def __init__(self, config: EngineConfig, target: TargetSpec, context: EngineContext) -> None:
        """Load the target onto the device of ``context``."""
        from spec_engine_hf.decoding import Decoder
        from spec_engine_hf.hf_model import HfModel

        super().__init__(config, target, context)
        self._config = cast("HfConfig", config)
        self._device = context.claim_device()
        self._transport = context.open_transport()
        self._model = HfModel(target, self._device, self._config.dtype or target.dtype)
        self._decoder = Decoder(self._model)
        self._senders: dict[tuple[str, FeatureSchema], FeatureSender] = {}
        self._closing = threading.Event()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="hf-engine")
        self._draft_folder: Path | None = None
        self._updates: UpdateReceiver | None = None
        """Receives fresh weights for the loaded draft. The first call of ``draft_replica`` makes it."""

    def start(self, schema: FeatureSchema) -> None:
        """Check that states can be captured; the constructor has already loaded the target."""
        self._submit(lambda: self._check_capture(schema)).result()

    def capture(self, requests: Sequence[CaptureRequest], schema: FeatureSchema) -> Future[None]:
        """Queue the batch for the engine's thread (E1-E3)."""
        return self._submit(lambda: self._capture(list(requests), schema))

    def generate_unordered(
        self, next_request: Callable[[], GenerationRequest | None], sampling: SamplingParams
    ) -> Generator[tuple[GenerationRequest, Generation]]:
        """Decode round by round on the engine's thread, which runs other calls between rounds (E4, E10, E16, E19).

        When an answer ends, the next request begins in the next round. The draft that is served when a request
        begins is used for its whole answer.
        """
        # A KV cache that cannot drop tokens cannot align several sequences either.
        most = 1 if self._model.unrewindable_layers() else self._config.max_num_seqs
        most = min(most, sampling.concurrency or most)
        batch, served = self._submit(lambda: self._begin(sampling)).result()
        may_ask = True
        while True:
            is_served = batch.decoder is self._decoder  # another thread may load another draft
            if not is_served and not batch.num_running:
                batch, served = self._submit(lambda: self._begin(sampling)).result()
                continue
            new: list[GenerationRequest] = []
            while may_ask and is_served and batch.num_running + len(new) < most:
                if (request := next_request()) is None:
                    may_ask = False
                else:
                    new.append(request)
            if not new and not batch.num_running:
                return
            for request, answer in self._submit(partial(batch.decoder.step, batch, new)).result():
                may_ask = True
                if served is not None:
                    answer = replace(answer, draft_version=served.version, draft_digest=served.digest)
                yield request, answer

    def frozen_products(self, token_ids: Sequence[int], vector: Sequence[float]) -> FrozenProducts:
        """Return products with the embedding and head that Transformers has loaded (E17)."""
        return self._submit(lambda: self._model.frozen_products(token_ids, vector)).result()

    def load_draft(self, folder: Path) -> None:
        """Check ``folder``, and speculate with its draft from now on (E5)."""
        from spec_engine_hf.decoding import DraftSource

        source = DraftSource.of_export(folder, self._model)
        self._end_updates()
        self._serve(source)
        self._draft_folder = folder

    def use_proposer(self, new_proposer: Callable[[], Proposer], layers: tuple[int, ...] = ()) -> None:
        """From now on, speculate with a new proposer for each prompt, which gets the states of ``layers``."""
        from spec_engine_hf.decoding import DraftSource

        self._end_updates()
        self._serve(DraftSource(new_proposer=new_proposer, layers=layers))
        self._draft_folder = None

    def draft_replica(self, group: str = "default") -> DraftReplica:
        """Return the replica that updates the draft loaded last, until another draft is loaded (E10)."""
        from spec_engine_hf.export_slot import ExportSlot
        from spec_kit.weight_sync import ReceiverReplica, UpdateReceiver, open_weight_transports

        source = self._decoder.drafting
        folder = self._draft_folder
        if source is None or folder is None:
            raise EngineError(
                "this engine has no exported draft whose weights could be updated; load one first"
            )
        if self._updates is None:
            slot = ExportSlot(source, folder, self._model, self._serve)
            transports = open_weight_transports(self.context.backend)
            self._updates = UpdateReceiver(slot, transports, group=group)
        elif self._updates.group != group:
            raise EngineError(
                f"the draft of this engine is in update group {self._updates.group!r}, not in {group!r}"
            )
        return ReceiverReplica(self._updates)

    def acceptance(self) -> AcceptanceCounters:
        """Return the acceptance counters since a draft was last loaded (E5)."""
        return self._decoder.acceptance()

    def health(self) -> None:
        """Raise EngineError if the target computes non-finite states.

        There is no other process whose death would have to be detected.
        """
        if not self._submit(self._model.is_finite).result():
            raise EngineError(f"target {self.target.folder} computes states that are not finite")

    def close(self) -> None:
        """End each capture, and each generation, after its current forward pass.

        A capture ends even if it waits for a trainer that has stopped receiving. Calls in progress or queued end with
        EngineError.
        """
        self._closing.set()
        self._end_updates()
        self._worker.shutdown(wait=True)
        for sender in self._senders.values():
            sender.close()
        self._senders.clear()

    def _begin(self, sampling: SamplingParams) -> tuple[Batch, ServingStatus | None]:
        """Return an empty batch that decodes with the served draft, and this draft if it was pushed."""
        updates = self._updates
        if updates is None or not sampling.num_draft_tokens:
            return self._decoder.begin(sampling), None
        with updates.unchanged() as served:
            return self._decoder.begin(sampling), served

    def _serve(self, source: DraftSource) -> None:
        """Draft with ``source`` from the next prompt on, with new acceptance counters."""
        from spec_engine_hf.decoding import Decoder

        self._decoder = Decoder(self._model, source)

    def _end_updates(self) -> None:
        if self._updates is not None:
            self._updates.forget()
            self._updates.close()
            self._updates = None

    def _submit(self, work: Callable[[], R]) -> Future[R]:
        def run() -> R:
            self._check_open()
            return work()

        self._check_open()
        return self._worker.submit(run)

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise EngineError("the hf engine is closed")

    def _capture(self, requests: list[CaptureRequest], schema: FeatureSchema) -> None:
        import torch

        from spec_kit.layers import encode_features

        self._check_capture(schema)
        for indices in forward_passes(requests, self.config.batch_tokens):
            self._check_open()
            chosen = [requests[index] for index in indices]
            if chosen[0].images:
                states = [self._model.states_with_images(chosen[0].input_ids, chosen[0].images, schema)]
            else:
                states = self._model.states([r.input_ids for r in chosen], schema)
            for request, captured_TNH in zip(chosen, states, strict=True):
                hidden_TNH = encode_features(captured_TNH, schema)
                ids = torch.tensor(request.input_ids, dtype=torch.int64, device=self._device)
                sample = FeatureSample(request_id=request.request_id, input_ids=ids, hidden_TNH=hidden_TNH)
                for destination in request.destinations:
                    self._send(self._sender(destination, schema), sample)

    def _check_capture(self, schema: FeatureSchema) -> Transport:
        """Return the transport to the trainers.

        Raise EngineError if there is no transport, or if the states cannot be captured.
        """
        if self._transport is None:
            raise EngineError("this engine was created without a transport: it can generate, not capture")
        self.check_schema(schema)
        return self._transport

    def _sender(self, destination: str, schema: FeatureSchema) -> FeatureSender:
        key = (destination, schema)
        if key not in self._senders:
            transport = self._check_capture(schema)
            self._senders[key] = transport.connect(destination, schema.sent, self._config.send_timeout_s)
        return self._senders[key]

    def _send(self, sender: FeatureSender, sample: FeatureSample) -> None:
        """Send a sample, retrying in short intervals so that ``close`` can interrupt it.

        T6 allows a send to be repeated.

        The handle that ``send`` returns is not awaited: the sample has its own memory, which lives as long as the
        transport refers to it.
        """
        deadline = time.monotonic() + self._config.send_timeout_s
        while True:
            left = deadline - time.monotonic()
            try:
                sender.send(sample, max(0.0, min(_SEND_SLICE_S, left)))
                return
            except DeadlineExceeded:
                if left <= _SEND_SLICE_S or self._closing.is_set():
                    raise


def forward_passes(requests: Sequence[CaptureRequest], batch_tokens: int) -> list[list[int]]:
    """Divide a capture batch into forward passes: lists of request indices, longest sample first.

    No pass has more than ``batch_tokens`` tokens, padding included. A sample with images has a pass of its
    own, so that only one sample's images are in memory at a time.
    """
    lengths = [len(request.input_ids) for request in requests]
    passes: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if lengths[index] > batch_tokens:
            raise ConfigError(
                f"a sample has {lengths[index]} tokens, engine.batch_tokens={batch_tokens}; "
                f"raise it or lower data.max_length"
            )
        alone = not passes or any(requests[i].images for i in (index, passes[-1][0]))
        if not alone and (len(passes[-1]) + 1) * lengths[passes[-1][0]] <= batch_tokens:
            passes[-1].append(index)
        else:
            passes.append([index])
    return passes
