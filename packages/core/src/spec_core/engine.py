"""An Engine runs the target, in this process or in processes that it starts.

Contract (``spec_testing.EngineSuite`` quotes the numbers):

E1  ``capture`` sends exactly one FeatureSample per request to each of the request's destinations, and to no other.
    The sample has the request's id and the token ids that were run. Requests in progress have different ids.
E2  Layer k of the schema is the residual stream entering target layer k; k = num_layers is the input of the
    final norm. Values do not depend on which requests share a batch, beyond rounding. They are sent as
    ``FeatureSchema.sent`` says, over connections of that schema.
E3  The future of a capture is done when every sample was handed to its transport. An error of the target or
    of a send ends the future with a SpecError; it is never only logged.
E4  ``generate`` without draft tokens is plain decoding; greedy output with a draft equals it token by token
    (in float32). Sampled output follows the target's distribution exactly, with a draft or without.
E5  ``load_draft`` checks the whole folder before it changes anything, and resets the counters of
    ``acceptance``.
E6  ``health`` raises EngineError if the engine cannot serve. It may be called from any thread, also while the engine
    works. ``close`` is idempotent and releases everything.
E7  ``create`` is the only constructor that the application calls, for every engine. An engine whose context has
    neither a transport nor a placement generates; its ``start`` and its captures fail with EngineError.
E8  ``check_draft`` raises UsageError, one line, if this engine cannot serve a draft folder with the given number of
    draft tokens per round. It only reads files, before anything starts. ``check_method`` needs no folder: it raises
    ConfigError if this engine can serve no export of the draft. Optional: by default every draft is accepted.
E9  ``start`` waits until the engine is ready to capture for a schema. It raises EngineError if the target does not
    have the schema's layers or width. Other calls work without ``start``, too: they start what they need.
E10 ``draft_replica`` returns the object by which a publisher updates the weights of the served draft (contract:
    ``spec_core.draft_replica``). It raises EngineError if no draft is loaded.
E11 Answers with a draft have ``Generation.guess_depths``, which agree with the counters of ``acceptance``.
E12 ``Generation.verifications`` of all answers add up to the counters of ``acceptance``. Optional: by default
    answers have none.
E13 With ``SamplingParams.with_times``, each token of an answer has its time in ``Generation.times_s``,
    ascending, and no more than ``SamplingParams.concurrency`` prompts are answered at once. Optional: by
    default there are no times.
E14 ``abilities`` declares the optional abilities: E10, E11, E15, E16, ``use_proposer`` and running in this
    process. A declared ability works. Without an ability its method raises EngineError, or answers have no
    ``guess_depths``.
E15 With the ability ``images``, the target computes the states of a request from its tokens and its images
    (``CaptureRequest.images``). Nothing computed for one image is used for another, even if their tokens are
    equal. An image that cannot be read or has changed raises DataError.
E16 With the ability ``image_prompts``, ``generate`` takes prompts with images (``PromptWithImages``) and prompts
    without, and E4, E11 and E12 hold for both. An engine without it gets no prompt with images.
E17 ``frozen_products`` returns what the embedding and the head that the engine has loaded give for some tokens, each
    up to one positive factor. A run compares them with the target's folder before it captures. Optional: by default
    it returns None, because an engine does not know.
E18 An answer ends with its first end token (``TargetSpec.eos_token_ids``), which is its last token, or has
    ``max_new_tokens`` tokens. No token ends it if ``SamplingParams.stop_at_eos`` is False.
E19 ``generate_unordered`` calls ``next_request`` whenever it can take one more request, in the thread that iterates,
    and yields each request with its answer as soon as the answer is complete. After None it calls again when it
    has yielded another answer. It ends after None, once all answers were yielded. It takes only as many requests
    ahead as keep it busy, however many there are. If the iterator is closed, the requests in progress are dropped.
E20 Requests without a seed are sampled with random numbers of the engine's own: equal prompts get different answers.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from spec_core.config import EngineConfig
from spec_core.errors import ArtifactError, EngineError
from spec_core.records import AcceptanceCounters, Availability, GenerationRequest
from spec_core.resource import Resource

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    import torch

    from spec_core.backend import Backend, Placement
    from spec_core.draft import Draft, Proposer
    from spec_core.draft_replica import DraftReplica
    from spec_core.records import CaptureRequest, FeatureSchema, Generation, SamplingParams
    from spec_core.serving import Serving
    from spec_core.target import TargetSpec
    from spec_core.transport import Transport


@dataclass(frozen=True, kw_only=True)
class EngineContext:
    """The arguments that the application passes to an engine besides its section of the configuration.

    An engine runs on the devices that its process sees (B4). An engine that runs the target in this process
    gets the device from ``claim_device`` and the transport from ``open_transport``. An engine that starts
    further processes passes the fields on to them.
    """

    backend: Backend
    placement: Placement | None = None
    """How features reach the trainers; None for an engine that only generates."""
    transport: Transport | None = None
    """The transport that the trainer in this process listens on; None if the trainer is another process."""
    memory_fraction: float | None = None
    """Share of each device's memory that the engine may take; None leaves it to the engine."""
    reuse_prefixes: bool = False
    """Whether an answer may use what was computed for another prompt with the same beginning. A measurement of speed
    must not."""
    start_s: float = 600.0
    """Longest wait, in seconds, until the processes that the engine starts are ready."""
    peer_s: float = 120.0
    """Seconds after which a silent process of the engine counts as lost."""

    def claim_device(self) -> torch.device:
        """Limit this process's memory on its first device to ``memory_fraction``, and return the device."""
        if self.memory_fraction is not None:
            self.backend.limit_memory(self.memory_fraction)
        return self.backend.device(0)

    def open_transport(self) -> Transport | None:
        """Return the transport from this process to the trainers; None for an engine that only generates."""
        if self.transport is not None or self.placement is None:
            return self.transport
        return self.backend.transport(self.placement)


@dataclass(frozen=True, kw_only=True)
class FrozenProducts:
    """Products of a vector [H] with the embedding and the head that an engine has loaded (E17)."""

    embedding: tuple[float, ...]
    """Per token, the product of the vector and the token's embedding."""
    head: tuple[float, ...]
    """Per token, its logit if the vector is the output of the final norm."""
    dtypes: tuple[str, str] = ("", "")
    """Names of the dtypes of the engine's embedding and head, such as ``bfloat16``; empty if unknown."""


@dataclass(frozen=True, kw_only=True)
class EngineAbilities:
    """The optional abilities of an engine (E14). The application reads them before anything starts."""

    in_process: bool = False
    """The target runs in the process that creates the engine, which may then train as well (placement
    ``inline``)."""
    proposers: bool = False
    """``use_proposer`` works: the engine decodes with this project's code, which can call a proposer."""
    fresh_weights: bool = False
    """``draft_replica`` works (E10)."""
    guess_depths: bool = False
    """Answers have ``Generation.guess_depths``: which token was verified as which guess (E11)."""
    stops_early: bool = False
    """A capture runs no layer above the highest captured one."""
    images: bool = False
    """Captures take images, for targets that have a ``TargetSpec.image_token_id`` (E15)."""
    image_types: frozenset[str] | None = None
    """``TargetSpec.model_type`` of the targets for which captures take images. None means all that have an
    ``image_token_id``."""
    image_prompts: bool = False
    """Prompts may have images, for targets that have a ``TargetSpec.image_token_id`` (E16)."""


class Engine(Resource):
    """An engine captures the target's hidden states and decodes. The module's docstring has the contract."""

    API_VERSIONS: ClassVar[range] = range(1, 2)
    """Accepted versions of this interface (``docs/compatibility.md``)."""
    name: ClassVar[str]
    api_version: ClassVar[int]
    """Version of this interface that the plugin was written for."""
    Config: ClassVar[type[EngineConfig]] = EngineConfig
    abilities: ClassVar[EngineAbilities] = EngineAbilities()
    """Optional abilities that this engine has (E14)."""
    serving: ClassVar[Serving | None] = None
    """How users serve drafts with the engine's program; None if there is no such program."""

    def __init__(self, config: EngineConfig, target: TargetSpec, context: EngineContext) -> None:
        """Store the configuration, the target and the context; nothing starts."""
        self.config = config
        self.target = target
        self.context = context

    @classmethod
    def create(cls, config: EngineConfig, target: TargetSpec, context: EngineContext) -> Self:
        """Return an engine for ``target``; ``config`` is an instance of ``Config`` (E7)."""
        return cls(config, target, context)

    def check_schema(self, schema: FeatureSchema) -> None:
        """Raise EngineError if the target does not have the layers or the hidden size of ``schema``."""
        target = self.target
        if schema.hidden_size != target.hidden_size or schema.layers[-1] > target.num_layers:
            raise EngineError(
                f"schema {schema} does not fit target {target.folder}: {target.num_layers} layers of width "
                f"{target.hidden_size}"
            )

    @classmethod
    def probe(cls) -> Availability:
        """Return whether this engine can run on this machine. Never raises, and imports nothing heavy."""
        return Availability(ok=True)

    @classmethod
    def check_target(cls, config: EngineConfig, target: TargetSpec) -> None:
        """Raise TargetError if the installed version of this engine does not support the target's model type.

        Optional: by default every target is accepted. Called before anything starts; imports nothing heavy.
        """

    @classmethod
    def check_capture(cls, config: EngineConfig, schema: FeatureSchema) -> None:
        """Raise ConfigError if this engine, as configured, would capture wrong states for ``schema``.

        Optional: by default every schema is accepted. Called before anything starts; imports nothing heavy.
        """

    @classmethod
    def check_draft(
        cls, config: EngineConfig, target: TargetSpec, draft: Draft, folder: Path, num_draft_tokens: int
    ) -> None:
        """Raise UsageError if this engine, as configured, cannot serve the draft in ``folder`` (E8).

        ``draft`` was returned by ``Draft.from_folder(folder)``: its plugin has checked that the folder is
        complete and made for ``target``. The engine checks what the plugin does not check, and what the engine
        reads differently.
        """

    @classmethod
    def check_method(cls, config: EngineConfig, draft: Draft) -> None:
        """Raise ConfigError if this engine, as configured, cannot serve any export of the draft (E8).

        Optional: by default every draft is accepted. Called before an export exists.
        """

    @classmethod
    def runs_largest_image(cls, config: EngineConfig) -> bool:
        """Return whether the engine, when it starts on a device, runs the image encoder on the largest image.

        The target's image processor does not scale the largest image down. Optional: by default False. A run
        counts the memory of this pass before it starts.
        """
        return False

    @abstractmethod
    def start(self, schema: FeatureSchema) -> None:
        """Make the engine ready to capture for ``schema``, and wait until it is (E9)."""

    @abstractmethod
    def capture(self, requests: Sequence[CaptureRequest], schema: FeatureSchema) -> Future[None]:
        """Start to capture one batch of requests, and return at once (E1–E3).

        The engine may cut the batch into forward passes of at most ``config.batch_tokens`` tokens.
        """

    @abstractmethod
    def generate_unordered(
        self, next_request: Callable[[], GenerationRequest | None], sampling: SamplingParams
    ) -> Generator[tuple[GenerationRequest, Generation]]:
        """Yield requests with their answers, in the order in which the answers end (E4, E18, E19).

        ``next_request`` returns a request, or None if there is none at present: a later request may depend on an
        answer. Each request has its own seed, so ``sampling.seed`` is not used.
        """

    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[Generation]:
        """Return one answer for each prompt, in the order of the prompts."""
        requests = [
            GenerationRequest(prompt=prompt, seed=sampling.prompt_seed(index))
            for index, prompt in enumerate(prompts)
        ]
        waiting = iter(requests)
        answers = dict(self.generate_unordered(lambda: next(waiting, None), sampling))
        return [answers[request] for request in requests]

    def load_draft(self, folder: Path) -> None:
        """Decode with the exported draft in ``folder`` from now on (E5).

        Raise ArtifactError if the folder is not a draft. Optional: by default the engine decodes without a draft, and
        refuses every folder.
        """
        raise ArtifactError(f"engine {self.name!r} decodes without a draft, so it cannot load {folder}")

    def frozen_products(self, token_ids: Sequence[int], vector: Sequence[float]) -> FrozenProducts | None:
        """Return products of ``vector``, of length H, for these tokens, after ``start``; None if unknown (E17)."""
        return None

    def use_proposer(self, new_proposer: Callable[[], Proposer], layers: tuple[int, ...] = ()) -> None:
        """Decode with a new proposer for each prompt from now on, and reset the acceptance counters.

        ``layers``: ids of the target layers (as in FeatureSchema) whose hidden states ``Proposer.extend``
        gets. Engines without the ability ``proposers`` raise EngineError.
        """
        raise EngineError(f"engine {self.name!r} speculates with exported drafts only")

    def draft_replica(self, group: str = "default") -> DraftReplica:
        """Return the DraftReplica that updates the loaded draft's weights in the update group ``group`` (E10)."""
        raise EngineError(f"engine {self.name!r} cannot take fresh weights for its draft while it serves")

    def acceptance(self) -> AcceptanceCounters:
        """Return the acceptance counters since the last ``load_draft`` (E5); by default there are none."""
        return AcceptanceCounters()

    @abstractmethod
    def health(self) -> None:
        """Raise EngineError if the engine cannot serve (E6)."""
