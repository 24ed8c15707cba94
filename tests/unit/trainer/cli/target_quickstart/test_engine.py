"""Which engine runs the target, if none is named."""

import pytest

from spec_core import Draft
from spec_core.errors import ConfigError, EngineError, PluginUnavailable
from spec_core.plugins import load
from spec_kit.targets.target_reader import read_target
from spec_trainer.cli.target_quickstart import work
from spec_trainer.cli.target_quickstart.budget import ANSWERS, COST, FIGURES, PROMPTS, TRAINING
from spec_trainer.cli.target_quickstart.engine import AnsweringEngine, choose_engine
from spec_trainer.cli.target_quickstart.recipe import Machine

from .....distributions import write_distribution

CPU = Machine(backend="cpu", is_cpu=True, has_bfloat16=False)
ACCELERATOR = Machine(backend="cpu", is_cpu=False, has_bfloat16=True)

MODULE = """
from spec_core import EngineAbilities
from spec_core.errors import ConfigError
from spec_core.records import Availability
from spec_engine_hf.engine import HfEngine

class Inside(HfEngine):
    name = "a-inside"

class Absent(HfEngine):
    name, abilities = "b-absent", EngineAbilities()

    @classmethod
    def probe(cls):
        return Availability(ok=False, reason="its program is not installed")

class Blind(HfEngine):
    name, abilities = "c-blind", EngineAbilities()

    @classmethod
    def check_capture(cls, config, schema):
        raise ConfigError("it captures nothing")

class Able(HfEngine):
    name, abilities = "d-able", EngineAbilities()
"""
NAMES = {"a-inside": "Inside", "b-absent": "Absent", "c-blind": "Blind", "d-able": "Able"}


@pytest.fixture
def engines(tmp_path, monkeypatch):
    points = [f"{name} = machine_engines:{of}\n" for name, of in NAMES.items()]
    site = write_distribution(tmp_path / "site", "machine-engines", f"[spec_core.engines]\n{''.join(points)}")
    (site / "machine_engines.py").write_text(MODULE)
    monkeypatch.syspath_prepend(site)


@pytest.fixture
def choose(engines, tiny_llama):
    draft_type = load(Draft, "eagle3")
    target, draft = read_target(tiny_llama), draft_type(draft_type.Config(name="eagle3"))
    return lambda name, machine: choose_engine(name, machine, target, draft)


def test_an_accelerator_gets_the_first_engine_of_its_own_processes_that_can_do_all(choose):
    options, words = choose(None, ACCELERATOR)
    assert (options.config.engine.name, words) == ("d-able", ())


def test_a_cpu_gets_the_default_engine(choose):
    options, words = choose(None, CPU)
    assert options.config.engine.name == "hf"
    assert words == ("engine.max_num_seqs=8", "engine.dtype=float32")


def test_a_named_engine_is_taken(choose):
    options, _ = choose("a-inside", ACCELERATOR)
    assert options.config.engine.name == "a-inside"


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("b-absent", PluginUnavailable, "its program is not installed"),
        ("c-blind", ConfigError, "captures nothing"),
    ],
)
def test_a_named_engine_that_cannot_do_it_is_an_error(choose, name, error, message):
    with pytest.raises(error, match=message):
        choose(name, ACCELERATOR)


def test_short_rounds_train_with_an_engine_that_needs_no_start(engines, request_of, monkeypatch):
    monkeypatch.setattr(work, "look_at_machine", lambda backend: ACCELERATOR)
    checked = work.check_request(request_of(engine=None))
    assert checked.engine == "d-able"
    trains = {seconds: checked.training_engine(seconds)[0].config.engine.name for seconds in (1799, 1800)}
    assert trains == {1799: "a-inside", 1800: "d-able"}
    assert set(checked.slow_starts(1800)) - set(checked.slow_starts(1799)) == {TRAINING}
    assert FIGURES in checked.slow_starts(1799)


def test_prompts_cost_and_answers_share_one_start(engines, request_of, data, monkeypatch):
    monkeypatch.setattr(work, "look_at_machine", lambda backend: ACCELERATOR)
    for own, starts in ((None, PROMPTS), (str(data), COST)):
        slow = work.check_request(request_of(engine="d-able", data=own)).slow_starts(60)
        assert {PROMPTS, COST, ANSWERS} & set(slow) == {starts}


def test_a_named_engine_trains_a_short_round_if_it_needs_no_start(engines, request_of, monkeypatch):
    monkeypatch.setattr(work, "look_at_machine", lambda backend: ACCELERATOR)
    trains = [work.check_request(request_of(engine=name)).training_engine(60) for name in ("d-able", "hf")]
    assert [options.config.engine.name for options, _ in trains] == ["a-inside", "hf"]


def test_an_answering_engine_starts_at_its_first_use_and_again_after_it_was_closed(choose, tiny_llama):
    options, _ = choose("a-inside", CPU)
    with AnsweringEngine(options, read_target(tiny_llama)) as answering:
        first = answering.started()
        assert answering.started() is first
        answering.close()
        with pytest.raises(EngineError, match="closed"):
            first.health()
        second = answering.started()
        second.health()
    with pytest.raises(EngineError, match="closed"):
        second.health()
