"""ServedDraft is the base class of drafts that are served from config.json and model.safetensors.

Importing this module imports no torch.
"""

from __future__ import annotations

from abc import abstractmethod
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

from spec_core import Draft, DraftConfig, DraftCost, no_kernel
from spec_core.errors import ArtifactError, ConfigError, TargetError
from spec_core.wording import shown
from spec_kit.drafting.draft_checkpoint import DraftCheckpoint
from spec_kit.drafting.draft_files import (
    DOWNLOAD_FIRST,
    architectures,
    as_served,
    check_shapes,
    present,
    read_config,
    read_shapes,
    section,
)
from spec_kit.drafting.draft_folder import describe_folder
from spec_kit.drafting.draft_shape import DraftShape
from spec_kit.drafting.speculators_layout import KIND, LAYERS
from spec_kit.drafting.vocabulary_shape import VocabularyShape

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor, nn

    from spec_core import FindKernel, TargetSpec, TargetTensors
    from spec_kit.drafting.draft_files import Json, Shapes

C = TypeVar("C", bound=DraftConfig)
S = TypeVar("S", bound=DraftShape)

EMBEDDING = "embed_tokens.weight"
"""Name of a copy of the target's embedding in a draft's folder."""
HEAD = "lm_head.weight"
"""Name of a draft's head, or of a copy of the target's head in a draft's folder."""


class ServedDraft(Draft, Generic[C, S]):
    """Base of drafts that are exported as config.json and model.safetensors.

    Subclasses define the algorithm. With ``init_from``, the folder determines every option of section ``draft``
    that is also a field of the shape.
    """

    architecture: ClassVar[str]
    """Name in ``architectures`` of the exported config.json."""
    Shape: ClassVar[type[DraftShape]]
    speculators_type: ClassVar[str] = ""
    """Name of the algorithm in folders of ``speculators``; empty if such folders cannot be read or written."""
    speculators_architecture: ClassVar[str] = ""
    """Name of the algorithm's class in ``speculators``."""
    depth_option: ClassVar[str] = ""
    """Name of the option that sets how many tokens ahead the draft is trained to guess; empty for none.

    An exported config.json records the number under this name. No engine reads it.
    """
    quantised_modules: ClassVar[tuple[str, ...]] = ()
    """Last names of the layers' modules whose matrices may be exported in 8 bits; empty if engines load none."""
    may_copy_head: ClassVar[bool] = False
    """Whether the folder of a draft without a trained head may hold a copy of the target's head."""
    may_lack_head: ClassVar[bool] = False
    """Whether the folder of a draft with a trained head of all tokens may lack it: then it is the target's head."""

    def __init__(self, config: DraftConfig) -> None:
        """Open and check the folder ``init_from``, if it is set, before a run starts.

        Raise ArtifactError for a wrong folder, ConfigError for an option that contradicts it.
        """
        self.checkpoint: DraftCheckpoint[S] | None = None
        if config.init_from is not None:
            self.checkpoint = self.open_checkpoint(config.init_from)
            if self.checkpoint is None:
                raise _not_a_draft(config.init_from, self.name)
            config = resolve_init_from(config, self.checkpoint)
        super().__init__(config)
        self.options: C = config  # pyright: ignore[reportAttributeAccessIssue]
        """The same as ``config``, with the options that the folder ``init_from`` determines filled in."""
        self.trained_depth: int | None = getattr(config, self.depth_option, None)
        """How many tokens ahead the draft is trained to guess; None if that is not known."""

    @classmethod
    def from_folder(cls, folder: Path) -> Self | None:
        """Return the draft of an exported folder, or None if the folder is another algorithm's (D8)."""
        checkpoint = cls.open_checkpoint(folder)
        if checkpoint is None:
            return None
        draft = cls(cls.Config(name=cls.name, init_from=folder))
        draft.trained_depth = checkpoint.trained_depth
        return draft

    @classmethod
    def open_checkpoint(cls, folder: Path) -> DraftCheckpoint[Any] | None:
        """Return the checked folder, or None for another algorithm. Raise ArtifactError if it is damaged."""
        fields = read_config(folder)
        if fields is None:
            return None
        is_speculators = KIND in fields  # and the tensor file may hold the target's embedding and head
        key = KIND if is_speculators else "architectures"
        named = f"{key}={shown(fields.get(key))}"
        if is_speculators:
            if not cls.speculators_type or fields[KIND] != cls.speculators_type:
                return None
            own = cls.speculators_fields(present(fields), folder)
            fields = {**section(fields, LAYERS, folder), **own}
        if not cls.is_own(fields):
            return None
        with _read_as(cls.name, named):
            shape = cls.shape_type(fields).from_json(fields, folder)
        stored = cls.stored_shapes(folder)
        names = dict[str, str]()
        for name in stored:
            other = names.setdefault(cls.module_name(name), name)
            if other != name:
                raise ArtifactError(f"draft {folder}: {other} and {name} are the same tensor, stored twice")
        embedding = names.pop(EMBEDDING, None)
        may_copy = is_speculators or cls.may_copy_head or shape.reduced
        is_copied = may_copy and HEAD not in shape.tensor_shapes()
        head = names.pop(HEAD, None) if is_copied else None
        required, optional = shape.mapping_shapes()
        required |= shape.tensor_shapes()
        if cls.may_lack_head and not shape.reduced:
            optional |= {HEAD: required.pop(HEAD)}
        found = {name: stored[names[name]] for name in names}
        check_shapes(folder, found, required, optional)
        depth = fields.get(cls.depth_option)
        depth = depth if type(depth) is int and depth > 0 else None
        checkpoint = DraftCheckpoint(folder, shape, names, embedding, head, depth)
        if "d2t" in names:
            from spec_kit.drafting.draft_vocabulary import read_mapping

            read_mapping(checkpoint)
        if is_copied and shape.reduced and head is None:
            raise ArtifactError(
                f"draft {folder} lacks {HEAD}, without which engines take the target's whole head"
            )
        cls.check_checkpoint(checkpoint)
        return checkpoint

    @classmethod
    def is_own(cls, fields: Json) -> bool:
        """Return whether a config.json describes a draft of this algorithm."""
        return cls.architecture in architectures(fields)

    @classmethod
    def shape_type(cls, fields: Json) -> type[DraftShape]:
        """Return the class of shapes that reads this config.json; most algorithms have one class."""
        return cls.Shape

    @classmethod
    def speculators_fields(cls, fields: Json, folder: Path) -> Json:
        """Return this algorithm's fields of a ``speculators`` config.json under the names that engines read.

        The method is called only if the file's ``speculators_type`` equals ``cls.speculators_type``.
        """
        return {}

    @classmethod
    def to_speculators(cls, served: Json) -> Json:
        """Return the fields that ``speculators_fields`` reads, from the fields that engines read.

        The method is called only if ``cls.speculators_type`` is set.
        """
        return {}

    @classmethod
    def stored_shapes(cls, folder: Path) -> Shapes:
        """Return the shapes of the draft's tensors by name in the file, without reading tensor data."""
        return read_shapes(folder)

    @classmethod
    def module_name(cls, stored_name: str) -> str:
        """Return a tensor's name in the module from its name in the file, which may have a prefix."""
        return stored_name.removeprefix("model.")

    @classmethod
    def check_checkpoint(cls, checkpoint: DraftCheckpoint[Any]) -> None:
        """Raise ArtifactError for damage specific to this algorithm; names and shapes are already checked."""

    def shape(self, target: TargetSpec) -> S:
        """Return the shape of the folder ``init_from``, or of a fresh draft."""
        return self.fresh_shape(target) if self.checkpoint is None else self.checkpoint.shape

    @abstractmethod
    def fresh_shape(self, target: TargetSpec) -> S:
        """Return the shape of a fresh draft, from the options and the target."""

    def check_target(self, target: TargetSpec) -> None:
        """Raise TargetError if the draft does not fit the target (D2), ConfigError if its vocabulary is too small.

        A reduced vocabulary must have each of the target's end tokens.
        """
        shape = self.shape(target)
        problems = (
            head_problem(target),
            shape.size_problem(target),
            self.target_problem(target),
            shape.problem(),
        )
        if problem := next(filter(None, problems), None):
            subject = (
                f"the {self.name} draft" if self.checkpoint is None else f"draft {self.checkpoint.folder}"
            )
            raise TargetError(
                f"{subject} does not go with target {target.folder} ({target.architecture}): {problem}"
            )
        if isinstance(shape, VocabularyShape) and len(target.eos_token_ids) > shape.vocab_size:
            raise ConfigError(
                f"draft.vocab_size={shape.vocab_size} does not hold the target's {len(target.eos_token_ids)} end "
                "tokens; raise it"
            )
        if self.checkpoint is not None:
            self.checkpoint.check_embedding(target, self.embedding_scale(target))
            self.checkpoint.check_head(target)

    def target_problem(self, target: TargetSpec) -> str | None:
        """Return why a draft of this algorithm cannot be made for the target, or None."""
        return None

    def cost(self, target: TargetSpec) -> DraftCost:
        """Return the trained weights' shapes, the cost of a step and the saved values (D14, D15)."""
        return DraftCost(
            weight_shapes=self.shape(target).tensor_shapes(),
            sample_flops=self.step_cost(target),
            saved_values=self.saved_values(target),
        )

    def step_cost(self, target: TargetSpec) -> Callable[[int, int], int]:
        """Return the cost of a step on a sample: a StepCost. By default it is the number of tokens."""
        return DraftCost.sample_flops

    def saved_values(self, target: TargetSpec) -> Callable[[int, int], int]:
        """Return the least number of values that a forward pass saves for a sample. By default it is 0."""
        return DraftCost.saved_values

    def embedding_scale(self, target: TargetSpec) -> float:
        """Return the factor of a stored copy of the embedding relative to the target's embedding."""
        return 1.0

    def build(
        self,
        target: TargetSpec,
        tensors: TargetTensors,
        token_counts: Tensor | None,
        kernel: FindKernel = no_kernel,
    ) -> nn.Module:
        """Return the network with fresh weights, or with the weights of ``init_from`` (D3)."""
        from spec_kit.drafting.unset_weights import UnsetWeights

        self.check_target(target)
        kernels = self.kernels().of(kernel)
        if self.checkpoint is None:
            module = self.new_module(target, tensors, kernels)
            kernels.attach(module)
            self.initialize(module, target, tensors, token_counts)
            return module
        with UnsetWeights():  # drawing random weights takes longer than reading the stored ones
            module = self.new_module(target, tensors, kernels)
        kernels.attach(module)
        state = self.stored_state(self.checkpoint)
        if HEAD in module.state_dict() and HEAD not in state:
            state[HEAD] = tensors.head_VH.float()
        module.load_state_dict(state)
        return module

    @abstractmethod
    def new_module(self, target: TargetSpec, tensors: TargetTensors, kernels: Any) -> nn.Module:
        """Return the network with weights drawn from torch's global generator.

        ``kernels``: an instance of the class that ``kernels()`` returns.
        """

    @abstractmethod
    def initialize(
        self, module: Any, target: TargetSpec, tensors: TargetTensors, token_counts: Tensor | None
    ) -> None:
        """Replace random weights by better initial weights in a fresh ``module`` (from ``new_module``)."""

    def stored_state(self, checkpoint: DraftCheckpoint[S]) -> dict[str, Tensor]:
        """Return the module's state dict from a checkpoint, in float32; a head that is not stored is left out."""
        names = checkpoint.shape.tensor_shapes()
        tensors = checkpoint.load(*(name for name in names if name in checkpoint.stored_names))
        state = {name: tensor.float() for name, tensor in tensors.items()}
        if not checkpoint.shape.reduced:
            return state
        from spec_kit.drafting.draft_vocabulary import read_mapping

        return state | read_mapping(checkpoint)

    @property
    def default_draft_tokens(self) -> int:
        """Number of tokens to guess by default, at most as many as the draft is trained to guess (D9)."""
        most = super().default_draft_tokens
        return min(most, self.trained_depth or most)

    def exported_config(self, target: TargetSpec) -> dict[str, Any]:
        """Return the fields of the exported config.json in the order in which they are written (D8)."""
        depth = {} if self.trained_depth is None else {self.depth_option: self.trained_depth}
        return self.shape(target).to_json(target) | depth

    def exported_tensors(
        self, weights: Mapping[str, Tensor], target: TargetSpec
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield name and tensor of each trained weight, in the dtype in which it is served (D8).

        The mapping of a reduced vocabulary follows them.
        """
        from spec_kit.drafting.draft_vocabulary import MAPPING

        shape = self.shape(target)
        for name in (*shape.tensor_shapes(), *(MAPPING if shape.reduced else ())):
            yield name, as_served(weights[name], target)


def resolve_init_from(config: DraftConfig, checkpoint: DraftCheckpoint[Any]) -> DraftConfig:
    """Return ``config`` with each option that is a field of the checkpoint's shape set from that shape.

    Raises ConfigError if an option that the user set contradicts the checkpoint.
    """
    found = {
        key: getattr(checkpoint.shape, key)
        for key in type(config).model_fields
        if hasattr(checkpoint.shape, key)
    }
    for key, value in found.items():
        wanted = getattr(config, key)
        if key in config.model_fields_set and wanted not in (None, value):
            raise ConfigError(
                f"draft.{key}={wanted!r} contradicts draft.init_from={checkpoint.folder}, whose value is {value!r}"
            )
    return config.model_copy(update={key: value for key, value in found.items() if value is not None})


def head_problem(target: TargetSpec) -> str | None:
    """Return why engines cannot serve a draft of this target, or None.

    Engines only serve a head that is an RMS norm followed by a linear layer without bias. A soft-cap of the target's
    logits is no problem: the draft's logits are not capped, and learn from the target's capped logits.
    """
    if target.norm == "layer":
        return "its final norm is a layer norm, an RMS norm is needed"
    if target.head_bias_name is not None:
        return f"its head has a bias ({target.head_bias_name}), a head without one is needed"
    return None


@contextmanager
def _read_as(name: str, named: str) -> Generator[None]:
    """If the ``with`` block raises ArtifactError, add which plugin reads the folder, and why.

    ``name``: the plugin. ``named``: the entry of config.json by which the plugin has recognised the folder.
    """
    try:
        yield
    except ArtifactError as error:
        raise ArtifactError(f"{error} (it is read as a draft of {name!r} because of {named})") from error


def _not_a_draft(folder: Path, name: str) -> ArtifactError:
    found = describe_folder(folder) if folder.is_dir() else f"there is no such folder; {DOWNLOAD_FIRST}"
    return ArtifactError(f"draft.init_from={folder} is not an exported {name} draft: {found}")
