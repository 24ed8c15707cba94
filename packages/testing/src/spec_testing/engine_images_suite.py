"""EngineImagesSuite tests E15 and E16 of spec_core.engine, for an engine with the ability ``images``.

::

    from spec_testing import EngineImagesSuite, SampleWithImages

    class TestMyEngineSees(EngineImagesSuite):
        @pytest.fixture
        def new_engine(self, target) -> Callable[[EngineContext], Engine]:
            return lambda context: MyEngine.create(MyConfig(name="mine"), target, context)

        @pytest.fixture
        def samples(self, target) -> Sequence[SampleWithImages]: ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from spec_core import Engine, EngineContext, Placement
from spec_core.errors import DataError
from spec_core.records import CaptureRequest, FeatureSchema, ImageSource, PromptWithImages, SamplingParams
from spec_kit.layers import TargetOps
from spec_kit.targets import read_target_tensors
from spec_testing.conformance import ConformanceSuite
from spec_testing.limits import patient
from spec_testing.reference import reference_backend

_LIMIT_S = patient(120.0)
_WINDOW_BYTES = 1 << 24
_TOLERANCE = 1e-4
"""Tolerance relative to the largest value: float32 rounding in batches of different shapes."""


@dataclass(frozen=True, kw_only=True)
class SampleWithImages:
    """A sample, and its states as computed by code that is independent of the engine."""

    input_ids: tuple[int, ...]
    images: tuple[bytes, ...]
    """The encoded images, such as PNG files, in the order of their tokens."""
    hidden_TNH: Tensor
    """Float32 inputs of the target's N − 1 layers and of its final norm."""


class EngineImagesSuite(ConformanceSuite):
    """Tests of captures with images. A subclass defines the fixtures ``new_engine`` and ``samples``.

    The engine must compute in float32. Two of the samples must have equal tokens and different images; one sample
    must have no image.
    """

    placement: ClassVar[Placement] = "inline"
    """Placement by which features reach the test process."""

    @pytest.fixture
    def new_engine(self) -> Callable[[EngineContext], Engine]:
        """Return a function that creates the engine for an EngineContext."""
        raise pytest.UsageError("an EngineImagesSuite needs a fixture 'new_engine': EngineContext -> Engine")

    @pytest.fixture
    def samples(self) -> Sequence[SampleWithImages]:
        """Return samples with the states that the target has for them."""
        raise pytest.UsageError("an EngineImagesSuite needs a fixture 'samples': SampleWithImages, …")

    @pytest.fixture
    def engine(self, new_engine: Callable[[EngineContext], Engine]) -> Iterator[Engine]:
        """Yield the engine under test, and close it after the test."""
        backend = reference_backend()
        own = backend.transport(self.placement) if self.placement == "inline" else None
        with new_engine(EngineContext(backend=backend, placement=self.placement, transport=own)) as engine:
            yield engine

    @pytest.fixture
    def schema(self, engine: Engine) -> FeatureSchema:
        """Return the states of the target's layers and of its final norm."""
        target = engine.target
        layers = tuple(range(target.num_layers + 1))
        return FeatureSchema(layers=layers, hidden_size=target.hidden_size, dtype="float32")

    def test_e15_states_are_those_of_the_target_that_sees(
        self, engine: Engine, schema: FeatureSchema, samples: Sequence[SampleWithImages]
    ) -> None:
        """E15: the states equal the target's, also for samples with equal tokens and different images."""
        assert engine.abilities.images
        assert engine.target.image_token_id is not None
        shown = {sample.input_ids: set[tuple[bytes, ...]]() for sample in samples}
        for sample in samples:
            shown[sample.input_ids].add(sample.images)
        assert () in set().union(*shown.values()), "one sample must have no image"
        assert max(map(len, shown.values())) > 1, "two samples must differ in nothing but their images"

        transport = engine.context.transport or reference_backend().transport(self.placement)
        with transport.listen(schema, _WINDOW_BYTES) as receiver:
            requests = [_request(index, sample, receiver.address) for index, sample in enumerate(samples)]
            engine.capture(requests, schema).result(_LIMIT_S)
            for _ in samples:
                got = receiver.receive(_LIMIT_S)
                expected = samples[got.request_id]
                assert tuple(got.input_ids.tolist()) == expected.input_ids
                scale = float(expected.hidden_TNH.abs().max())
                torch.testing.assert_close(
                    got.hidden_TNH.cpu(), expected.hidden_TNH, rtol=0, atol=_TOLERANCE * scale
                )
                receiver.release(got)

    def test_e15_changed_image_ends_in_the_future(
        self, engine: Engine, schema: FeatureSchema, samples: Sequence[SampleWithImages], tmp_path: Path
    ) -> None:
        """E15: an image file that has changed since the request raises DataError; the engine still serves."""
        sample = next(sample for sample in samples if sample.images)
        files = [tmp_path / f"{index}.png" for index in range(len(sample.images))]
        for file, image in zip(files, sample.images, strict=True):
            file.write_bytes(image)
        images = tuple(ImageSource.of_file(str(file)) for file in files)
        request = CaptureRequest(request_id=0, input_ids=sample.input_ids, images=images, destinations=())
        engine.capture([request], schema).result(_LIMIT_S)
        files[0].write_bytes(sample.images[0] + b"\0")
        assert isinstance(engine.capture([request], schema).exception(_LIMIT_S), DataError)
        files[0].write_bytes(sample.images[0])
        engine.capture([request], schema).result(_LIMIT_S)

    def test_e16_first_tokens_are_those_of_the_target_that_sees(
        self, engine: Engine, samples: Sequence[SampleWithImages]
    ) -> None:
        """E16: an answer's first token is the target's arg-max, for prompts with images and without."""
        if not engine.abilities.image_prompts:
            pytest.skip("the engine takes no prompts with images")
        target = engine.target
        ops = TargetOps(target, read_target_tensors(target), torch.device("cpu"), torch.float32)
        prompts = [
            PromptWithImages(sample.input_ids, tuple(map(ImageSource.of_data, sample.images)))
            if sample.images
            else sample.input_ids
            for sample in samples
        ]
        answers = engine.generate(prompts, SamplingParams(max_new_tokens=1, stop_at_eos=False))
        for answer, sample in zip(answers, samples, strict=True):
            best = ops.teacher_logits(sample.hidden_TNH[-1:, -1]).argmax(dim=-1)
            assert answer.token_ids == tuple(best.tolist())


def _request(index: int, sample: SampleWithImages, address: str) -> CaptureRequest:
    return CaptureRequest(
        request_id=index,
        input_ids=sample.input_ids,
        images=tuple(map(ImageSource.of_data, sample.images)),
        destinations=(address,),
    )
