"""SGLang captures targets that see, against Transformers driven by hand."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from spec_core import Engine, EngineContext
from spec_engine_sglang.config import SglangConfig
from spec_engine_sglang.engine import SglangEngine
from spec_kit.targets.target_reader import read_target
from spec_testing import EngineImagesSuite, SampleWithImages

from ..image_requests import picture, samples_with_images
from ..made_once import made_once
from ..seeing_targets import SEEING, save_seeing_target
from .sglang_here import ARGS, needs_sglang
from .sharing import Pool, sharing

pytestmark = [
    *needs_sglang,
    pytest.mark.usefixtures("sglang_environment"),
    pytest.mark.xdist_group("sglang images"),
    pytest.mark.timeout(600),
]
PATCH = 14
"""SGLang takes Qwen2.5-VL's images for features, and no pixels, if its patches have another size."""
SIZES = ((84, 84), (116, 165), (28, 315))
"""The image processor keeps the first, and scales the others."""


TYPES = SglangEngine.abilities.image_types or ()
KINDS = [
    pytest.param(kind, marks=[pytest.mark.slow] if kind != "qwen3_vl" else [])
    for kind in SEEING
    if f"{kind}_text" in TYPES
]
"""Each has an SGLang of its own, so each change has Qwen3-VL alone."""


@pytest.fixture(scope="module", params=KINDS)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind = request.param
    return made_once(
        tmp_path_factory, f"seeing-{kind}-{PATCH}", lambda to: save_seeing_target(to, kind, 64, 32, 32, PATCH)
    )


@pytest.fixture(scope="module")
def pool(sglang_environment) -> Iterator[Pool]:
    with Pool() as pool:
        yield pool


class TestSglangEngineSees(EngineImagesSuite):
    placement = "colocated"

    @pytest.fixture
    def new_engine(self, seeing: Path, pool: Pool) -> Callable[[EngineContext], Engine]:
        args = ARGS | {"mm_attention_backend": "sdpa"}
        config = SglangConfig(name="sglang", dtype="float32", batch_tokens=128, args=args)
        return partial(sharing(SglangEngine, pool).create, config, read_target(seeing))

    @pytest.fixture
    def samples(self, seeing: Path) -> list[SampleWithImages]:
        """Samples without images, with one and with three; the last ones take more than a batch."""
        pictures = [[picture(size, seed) for size in SIZES] for seed in range(2)]
        return samples_with_images(
            seeing, [[], pictures[0][:1], pictures[1][:1], pictures[0], pictures[1], pictures[0]]
        )
