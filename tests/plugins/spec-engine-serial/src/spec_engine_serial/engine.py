"""SerialEngine: the calls of an engine, one after the other. Imports neither torch nor Transformers."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, ClassVar, TypeVar, cast

from pydantic import Field

from spec_core import Engine, EngineAbilities, EngineConfig
from spec_core.errors import ConfigError, EngineError
from spec_core.records import AcceptanceCounters, Availability

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from pathlib import Path

    from spec_core import Draft, DraftReplica, EngineContext, FeatureSender, TargetSpec
    from spec_core.records import CaptureRequest, FeatureSchema, Generation, GenerationRequest, SamplingParams
    from spec_engine_serial.decoding import LoadedDraft
    from spec_kit.weight_sync import UpdateReceiver

R = TypeVar("R")


class SerialConfig(EngineConfig):
    """Section ``engine`` of a run that names this engine: ``engine.most_guesses=4`` works on the command line."""

    most_guesses: int = Field(16, ge=1)
    """Most tokens that a draft may propose a round."""


class SerialEngine(Engine):
    """Runs the target by Transformers in this process."""

    name: ClassVar[str] = "serial"
    api_version: ClassVar[int] = 1
    Config: ClassVar[type[EngineConfig]] = SerialConfig
    abilities: ClassVar[EngineAbilities] = EngineAbilities(in_process=True, fresh_weights=True)

    @classmethod
    def probe(cls) -> Availability:
        return Availability.of_distribution("transformers")

    @classmethod
    def check_draft(
        cls, config: EngineConfig, target: TargetSpec, draft: Draft, folder: Path, num_draft_tokens: int
    ) -> None:
        """E8: nothing is loaded yet; the draft's own plugin has found the folder whole."""
        if num_draft_tokens > (most := cast("SerialConfig", config).most_guesses):
            raise ConfigError(
                f"draft {folder} is to propose {num_draft_tokens} tokens a round, engine.most_guesses={most}; raise "
                "it or lower the number of draft tokens"
            )

    def __init__(self, config: EngineConfig, target: TargetSpec, context: EngineContext) -> None:
        from spec_engine_serial.decoding import Target

        super().__init__(config, target, context)
        self._model = Target(target, context.claim_device())
        self._transport = context.open_transport()
        self._senders: dict[tuple[str, FeatureSchema], FeatureSender] = {}
        self._thread = ThreadPoolExecutor(1)
        self._closed = False
        self._draft: LoadedDraft | None = None
        self._draft_folder: Path | None = None
        self._updates: UpdateReceiver | None = None

    def start(self, schema: FeatureSchema) -> None:
        """E9: the target is loaded already."""
        if self._transport is None:
            raise EngineError("this engine has no way to a trainer: it generates only")
        self.check_schema(schema)

    def capture(self, requests: Sequence[CaptureRequest], schema: FeatureSchema) -> Future[None]:
        """E3: whatever goes wrong ends up in the future."""
        return self._submit(lambda: self._capture(requests, schema))

    def generate_unordered(
        self, next_request: Callable[[], GenerationRequest | None], sampling: SamplingParams
    ) -> Generator[tuple[GenerationRequest, Generation]]:
        """E19: one request at a time keeps this engine busy."""
        while (request := next_request()) is not None:
            yield request, self._submit(lambda asked=request: self._answer(asked, sampling)).result()

    def load_draft(self, folder: Path) -> None:
        """E5: the new draft is whole before the old one is given up, with the updates that were meant for it."""
        from spec_engine_serial.decoding import LoadedDraft

        draft = LoadedDraft.of_folder(folder, self._model)
        self._end_updates()
        self._serve(draft)
        self._draft_folder = folder

    def acceptance(self) -> AcceptanceCounters:
        return AcceptanceCounters() if self._draft is None else self._draft.counters

    def draft_replica(self, group: str = "default") -> DraftReplica:
        """E10: an engine of one rank, which takes updates in this process."""
        from spec_engine_serial.serial_slot import SerialSlot
        from spec_kit.weight_sync import ReceiverReplica, UpdateReceiver, open_weight_transports

        if self._draft is None or self._draft_folder is None:
            raise EngineError("no draft is loaded whose weights could be updated; load one first")
        if self._updates is None:
            slot = SerialSlot(self._draft, self._draft_folder, self._model, self._serve)
            transports = open_weight_transports(self.context.backend)
            self._updates = UpdateReceiver(slot, transports, group=group)
        return ReceiverReplica(self._updates)

    def health(self) -> None:
        self._check_open()

    def close(self) -> None:
        """E6: what is under way ends first; a second call finds nothing to do."""
        self._closed = True
        self._end_updates()
        self._thread.shutdown()
        for sender in self._senders.values():
            sender.close()

    def _serve(self, draft: LoadedDraft) -> None:
        """Draft with it from the next prompt on; its counters are new."""
        self._draft = draft

    def _end_updates(self) -> None:
        if self._updates is not None:
            self._updates.forget()
            self._updates.close()
            self._updates = None

    def _answer(self, request: GenerationRequest, sampling: SamplingParams) -> Generation:
        """U3, U9: a draft is exchanged between two prompts, and the answer names the one that it began with."""
        from spec_engine_serial.decoding import answer

        if not sampling.num_draft_tokens:
            return answer(self._model, None, request, sampling)
        if self._updates is None:
            return answer(self._model, self._loaded(), request, sampling)
        with self._updates.unchanged() as served:
            draft = self._loaded()
        return answer(self._model, draft, request, sampling, served)

    def _loaded(self) -> LoadedDraft:
        if self._draft is None:
            raise EngineError("draft tokens are wanted, but no draft is loaded")
        return self._draft

    def _capture(self, requests: Sequence[CaptureRequest], schema: FeatureSchema) -> None:
        self.start(schema)
        for request in requests:
            sample = self._model.sample(request, schema)
            for destination in request.destinations:
                self._sender(destination, schema).send(sample, self.config.send_timeout_s)

    def _sender(self, destination: str, schema: FeatureSchema) -> FeatureSender:
        assert self._transport is not None
        if (destination, schema) not in self._senders:
            sender = self._transport.connect(destination, schema.sent, self.config.send_timeout_s)
            self._senders[destination, schema] = sender
        return self._senders[destination, schema]

    def _submit(self, work: Callable[[], R]) -> Future[R]:
        self._check_open()
        return self._thread.submit(work)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the serial engine is closed")
