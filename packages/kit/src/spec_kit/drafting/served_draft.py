"""ServedDraft: base of drafts that are served from a folder of config.json and model.safetensors. Needs no torch."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

from spec_core.config import DraftConfig
from spec_core.draft import Draft
from spec_core.errors import ArtifactError, ConfigError, TargetError
from spec_core.kernels import no_kernel
from spec_core.wording import shown
from spec_kit.drafting.draft_files import (
    DOWNLOAD_FIRST,
    architectures,
    as_served,
    check_shapes,
    load_tensors,
    present,
    read_config,
    read_shapes,
    section,
)
from spec_kit.drafting.draft_shape import DraftShape

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor, nn

    from spec_core.kernels import FindKernel
    from spec_core.target import TargetSpec, TargetTensors
    from spec_kit.drafting.draft_files import Json, Shapes

C = TypeVar("C", bound=DraftConfig)
S = TypeVar("S", bound=DraftShape)

EMBEDDING = "embed_tokens.weight"
"""Name of a draft's own copy of the target's embedding."""
HEAD = "lm_head.weight"
"""Name of a draft's head, or of its own copy of the target's."""
_SPECULATORS = "speculators_model_type"
"""Field of a config.json in the layout of the library ``speculators``: the name of the algorithm. This layout has the
fields of the decoder's layers in an object, and the target's embedding and head beside the draft's tensors."""


@dataclass(frozen=True)
class DraftCheckpoint(Generic[S]):
    """A served folder whose config.json, and names, shapes and dtypes of tensors, have been checked."""

    folder: Path
    shape: S
    stored_names: Mapping[str, str]
    """Name in the module -> name in the file, the embedding left out."""
    embedding: str | None
    """Name in the file of the draft's own copy of the target's embedding."""
    head: str | None = None
    """Name in the file of a copy of the target's head, for a draft without a head of its own."""

    def load(self, *names: str) -> dict[str, Tensor]:
        """Return tensors as stored, by their names in the module."""
        return load_tensors(self.folder, {name: self.stored_names[name] for name in names})

    def check_embedding(self, target: TargetSpec, scale: float) -> None:
        """Raise ArtifactError if a copy of the embedding is not ``scale`` times the target's.

        Training here, and some engines, use the target's in any case. Some rows are compared, to bfloat16's
        precision.
        """
        from spec_kit.targets.target_reader import read_target_tensors

        if self.embedding is not None and not self._holds(
            self.embedding, read_target_tensors(target).embedding_VH, scale
        ):
            raise ArtifactError(
                f"draft {self.folder}: its {self.embedding} is not the embedding of target {target.folder}: it was "
                "made for another target, or trained its own, which not every engine loads"
            )

    def check_head(self, target: TargetSpec) -> None:
        """Raise ArtifactError if a copy of the head is not the target's, which engines use in any case."""
        from spec_kit.targets.target_reader import read_target_tensors

        if self.head is not None and not self._holds(self.head, read_target_tensors(target).head_VH, 1.0):
            raise ArtifactError(
                f"draft {self.folder}: its {self.head} is not the head of target {target.folder}: it was made for "
                "another target"
            )

    def _holds(self, name: str, wanted_VH: Tensor, scale: float) -> bool:
        import torch

        found_VH = load_tensors(self.folder, {name: name})[name]
        rows = torch.arange(0, len(wanted_VH), max(1, len(wanted_VH) // 256))
        return found_VH.shape == wanted_VH.shape and torch.allclose(
            found_VH[rows].float(), scale * wanted_VH[rows].float(), rtol=2**-8, atol=1e-6
        )


class ServedDraft(Draft, Generic[C, S]):
    """A draft whose exports are config.json and model.safetensors.

    Subclasses say what is their own. An option of section ``draft`` that the shape has, too, is fixed by the
    folder ``init_from``.
    """

    architecture: ClassVar[str]
    """Name in ``architectures`` of the exported config.json."""
    Shape: ClassVar[type[DraftShape]]
    speculators_type: ClassVar[str] = ""
    """Name of the algorithm in folders of the library ``speculators``, where ``speculators_fields`` reads them."""
    may_copy_head: ClassVar[bool] = False
    """Whether served folders may hold a copy of the target's head beside a draft that has none of its own."""

    def __init__(self, config: DraftConfig) -> None:
        """Open ``init_from``: a wrong folder (ArtifactError) or option (ConfigError) fails before a run starts."""
        self.checkpoint: DraftCheckpoint[S] | None = None
        if config.init_from is not None:
            self.checkpoint = self.open_checkpoint(config.init_from)
            if self.checkpoint is None:
                raise _not_a_draft(config.init_from, self.name)
            config = resolve_init_from(config, self.checkpoint)
        super().__init__(config)
        self.options: C = config  # pyright: ignore[reportAttributeAccessIssue]
        """The same as ``config``, with what the folder ``init_from`` has fixed."""

    @classmethod
    def from_folder(cls, folder: Path) -> Self | None:
        """Return the draft of an exported folder, or None if the folder is another algorithm's (D8)."""
        if cls.open_checkpoint(folder) is None:
            return None
        return cls(cls.Config(name=cls.name, init_from=folder))

    @classmethod
    def open_checkpoint(cls, folder: Path) -> DraftCheckpoint[Any] | None:
        """Return the folder's draft, or None where it is another algorithm's; ArtifactError where it is damaged."""
        fields = read_config(folder)
        if fields is None:
            return None
        is_speculators = _SPECULATORS in fields
        key = _SPECULATORS if is_speculators else "architectures"
        named = f"{key}={shown(fields.get(key))}"
        if is_speculators:
            if not cls.speculators_type or fields[_SPECULATORS] != cls.speculators_type:
                return None
            own = cls.speculators_fields(present(fields), folder)
            fields = {**section(fields, "transformer_layer_config", folder), **own}
        if not cls.is_own(fields):
            return None
        with _read_as(cls.name, named):
            shape = cls.shape_type(fields).from_json(fields, folder)
        stored, names = cls.stored_shapes(folder), dict[str, str]()
        for name in stored:
            other = names.setdefault(cls.module_name(name), name)
            if other != name:
                raise ArtifactError(f"draft {folder}: {other} and {name} are the same tensor, stored twice")
        embedding = names.pop(EMBEDDING, None)
        is_copied = (is_speculators or cls.may_copy_head) and HEAD not in shape.tensor_shapes()
        head = names.pop(HEAD, None) if is_copied else None
        required, optional = shape.mapping_shapes()
        found = {name: stored[names[name]] for name in names}
        check_shapes(folder, found, shape.tensor_shapes() | required, optional)
        checkpoint = DraftCheckpoint(folder, shape, names, embedding, head)
        cls.check_checkpoint(checkpoint)
        return checkpoint

    @classmethod
    def is_own(cls, fields: Json) -> bool:
        """Return whether a config.json is of this algorithm."""
        return cls.architecture in architectures(fields)

    @classmethod
    def shape_type(cls, fields: Json) -> type[DraftShape]:
        """Return the shape that reads a config.json of this algorithm: for most there is one."""
        return cls.Shape

    @classmethod
    def speculators_fields(cls, fields: Json, folder: Path) -> Json:
        """Return the algorithm's own fields of a config.json of ``speculators``, as a served one has them.

        It is asked only where ``speculators_type`` is the folder's.
        """
        return {}

    @classmethod
    def stored_shapes(cls, folder: Path) -> Shapes:
        """Return the shapes of the draft's tensors by their names in the folder, without reading any."""
        return read_shapes(folder)

    @classmethod
    def module_name(cls, stored_name: str) -> str:
        """Return the module's name of a tensor, whatever prefix a file gives it."""
        return stored_name.removeprefix("model.")

    @classmethod
    def check_checkpoint(cls, checkpoint: DraftCheckpoint[Any]) -> None:
        """Raise ArtifactError for damage that only this algorithm knows of; names and shapes have been checked."""

    def shape(self, target: TargetSpec) -> S:
        """Return the shape of the folder ``init_from``, or of a fresh draft."""
        return self.fresh_shape(target) if self.checkpoint is None else self.checkpoint.shape

    @abstractmethod
    def fresh_shape(self, target: TargetSpec) -> S:
        """Return what the options and the target make of a fresh draft."""

    def check_target(self, target: TargetSpec) -> None:
        """Raise TargetError for a target that the draft cannot express (D2)."""
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
        if self.checkpoint is not None:
            self.checkpoint.check_embedding(target, self.embedding_scale(target))
            self.checkpoint.check_head(target)

    def target_problem(self, target: TargetSpec) -> str | None:
        """Return why a draft of this algorithm cannot be made for the target, or None."""
        return None

    def weight_shapes(self, target: TargetSpec) -> Shapes:
        """Return the shape of each trained weight by name (D14)."""
        return self.shape(target).tensor_shapes()

    def embedding_scale(self, target: TargetSpec) -> float:
        """Return what a stored copy of the embedding is multiplied by."""
        return 1.0

    def build(
        self,
        target: TargetSpec,
        tensors: TargetTensors,
        token_counts: Tensor | None,
        kernel: FindKernel = no_kernel,
    ) -> nn.Module:
        """Return the network: fresh, or with the weights of ``init_from`` (D3)."""
        self.check_target(target)
        module = self.new_module(target, tensors, self.kernels().of(kernel))
        if self.checkpoint is None:
            self.initialize(module, target, tensors, token_counts)
        else:
            module.load_state_dict(self.stored_state(self.checkpoint))
        return module

    @abstractmethod
    def new_module(self, target: TargetSpec, tensors: TargetTensors, kernels: Any) -> nn.Module:
        """Return the network with weights drawn from torch's global generator. ``kernels``: of ``kernels()``."""

    @abstractmethod
    def initialize(
        self, module: Any, target: TargetSpec, tensors: TargetTensors, token_counts: Tensor | None
    ) -> None:
        """Set what a fresh draft starts with in place of drawn weights. ``module``: of ``new_module``."""

    def stored_state(self, checkpoint: DraftCheckpoint[S]) -> dict[str, Tensor]:
        """Return the module's state dict, float32."""
        tensors = checkpoint.load(*checkpoint.shape.tensor_shapes())
        return {name: tensor.float() for name, tensor in tensors.items()}

    def exported_config(self, target: TargetSpec) -> dict[str, Any]:
        """Return the fields of the exported config.json, in their order (D8)."""
        return self.shape(target).to_json(target)

    def exported_tensors(
        self, weights: Mapping[str, Tensor], target: TargetSpec
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the trained tensors in the dtype that they are served in (D8)."""
        for name in self.shape(target).tensor_shapes():
            yield name, as_served(weights[name], target)


def resolve_init_from(config: DraftConfig, checkpoint: DraftCheckpoint[Any]) -> DraftConfig:
    """Return ``config`` with the options written out that the checkpoint fixes: those that its shape has, too.

    Raises ConfigError if an option that was written contradicts the checkpoint; a default never does.
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
    """Return why engines cannot serve a draft of this target, or None: a draft's head is rows behind an RMS norm."""
    if target.norm == "layer":
        return "its final norm is a layer norm, an RMS norm is needed"
    if target.logit_softcap is not None:
        return f"its head is soft-capped ({target.logit_softcap}), a linear head is needed"
    if target.head_bias_name is not None:
        return f"its head has a bias ({target.head_bias_name}), a head without one is needed"
    return None


@contextmanager
def _read_as(name: str, named: str) -> Generator[None]:
    """Say in errors why a folder is read as this algorithm's: an edited config.json may name another one."""
    try:
        yield
    except ArtifactError as error:
        raise ArtifactError(f"{error} (it is read as a draft of {name!r} because of {named})") from error


def _not_a_draft(folder: Path, name: str) -> ArtifactError:
    if not folder.is_dir():
        return ArtifactError(
            f"draft.init_from={folder} is not an exported {name} draft: there is no such folder; {DOWNLOAD_FIRST}"
        )
    found = "its config.json names another" if (folder / "config.json").is_file() else "it has no config.json"
    return ArtifactError(f"draft.init_from={folder} is not an exported {name} draft: {found}")
