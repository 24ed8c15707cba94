"""Every way in which a plugin can be wrong has its own error and its own words."""

import sys

import pytest

from spec_backend_cpu.backend import CpuBackend
from spec_core import Backend, Draft, Engine, Optimizer, Strategy, plugins
from spec_core.errors import (
    PluginApiMismatch,
    PluginError,
    PluginImportFailed,
    PluginInvalid,
    PluginNotFound,
    PluginUnavailable,
)

from ...distributions import write_distribution
from .conftest import GOOD


def refusal(error: type[PluginError], interface=Backend, name: str = "planted") -> str:
    """The one line that says why the plugin cannot be used."""
    with pytest.raises(error) as raised:
        plugins.load_available(interface, name)
    assert type(raised.value) is error
    assert len(str(raised.value).splitlines()) == 1
    return str(raised.value)


def test_plugin_that_keeps_the_rules_loads(install):
    install("spec-planted")
    plugin = plugins.load_available(Backend, "planted")
    assert issubclass(plugin, CpuBackend)
    assert plugins.find(Backend, "planted").owner == "spec-planted 3.1"


def test_unknown_name_lists_what_is_installed_and_suggests(install):
    install("spec-planted")
    message = refusal(PluginNotFound, name="plantde")
    assert "no backend plugin is called 'plantde' (did you mean 'planted'?)" in message
    installed = message.partition("installed: ")[2].split(", ")
    assert {"cpu", "planted"} <= set(installed)


def test_missing_plugin_that_is_offered_comes_with_the_pip_line(tmp_path, monkeypatch):
    info = tmp_path / "spec_trainer-0.0.7.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: spec-trainer\nVersion: 0.0.7\nProvides-Extra: cuda\n"
        "Requires-Dist: spec-backend-cuda<0.2,>=0.1; extra == 'cuda'\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    message = refusal(PluginNotFound, name="cuda")
    assert message.endswith("(none is installed); installed: none; pip install spec-backend-cuda")


def test_missing_plugin_that_nobody_offers_comes_without_a_pip_line(monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    assert refusal(PluginNotFound, name="cuda").endswith("installed: none")


def test_package_without_the_plugin_yet_is_said_to_be_too_old(tmp_path, monkeypatch):
    write_distribution(tmp_path, "spec-backend-cuda", version="0.0.7")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    message = refusal(PluginNotFound, name="cuda")
    assert "spec-backend-cuda 0.0.7 is installed but does not provide it yet" in message
    assert message.endswith("pip install --upgrade spec-backend-cuda")


@pytest.mark.parametrize(
    ("interface", "kind"), [(Draft, "draft"), (Engine, "engine"), (Strategy, "strategy")]
)
def test_unknown_name_of_each_kind_names_the_kind(interface, kind):
    assert f"no {kind} plugin is called 'no-such-thing' (known: " in refusal(
        PluginNotFound, interface, "no-such-thing"
    )


def test_one_distribution_seen_twice_is_no_conflict(install, monkeypatch):
    folder = install("spec-planted")
    (folder.parent / "again").symlink_to(folder)
    monkeypatch.syspath_prepend(folder.parent / "again")
    assert plugins.load(Backend, "planted").name == "planted"


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("raise SystemExit", "SystemExit"),
        ("raise GeneratorExit('x')", "GeneratorExit: x"),
        ("class Panic(BaseException): ...\nraise Panic('at 0')", "Panic: at 0"),
        ("raise ValueError('no number')", "ValueError: no number"),
        ("import warnings; warnings.warn('old')", "UserWarning: old"),
        ("import absent", "ModuleNotFoundError: No module named 'absent'"),
        ("raise RuntimeError('no driver\\nsee the manual')", "RuntimeError: no driver"),
        ("Plantd = 1", "AttributeError: module 'spec_planted' has no attribute 'Planted'"),
    ],
)
def test_module_that_does_not_import_is_broken(install, source, cause):
    """Modules that call ``exit`` are broken, too."""
    install("spec-planted", source)
    assert refusal(PluginImportFailed) == (
        f"backend 'planted' of spec-planted 3.1 does not import (spec_planted:Planted): {cause}"
    )


def test_ctrl_c_during_an_import_is_ctrl_c(install):
    install("spec-planted", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        plugins.load(Backend, "planted")


def test_an_entry_point_of_a_misspelt_group_is_found(install):
    install("spec-planted", group="backendz")
    (record,) = plugins.unknown_groups()
    assert (record.kind, record.name, record.owner) == ("spec_core.backendz", "planted", "spec-planted 3.1")
    assert plugins.unknown_group_problem(record.kind) == (
        "there is no such kind of plugin (did you mean 'spec_core.backends'?)"
    )


def test_cause_of_a_failed_import_is_kept(install):
    install("spec-planted", "1 / 0")
    with pytest.raises(PluginImportFailed) as raised:
        plugins.load(Backend, "planted")
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("source", ["class Planted: ...", "Planted = 7", "def Planted(): ..."])
def test_wrong_base_class_is_named(install, source):
    install("spec-planted", source)
    message = refusal(PluginInvalid)
    assert message.endswith("spec_planted:Planted is not a subclass of spec_core.Backend")


def test_plugin_of_another_kind_is_the_wrong_base_class(install):
    install("spec-planted", GOOD, group="drafts")
    assert refusal(PluginInvalid, Draft).endswith("is not a subclass of spec_core.Draft")


def test_abstract_methods_that_are_left_are_listed(install):
    source = """
        from spec_core import Backend

        class Planted(Backend):
            name, api_version = "planted", 1
            probe = classmethod(lambda cls: None)
    """
    install("spec-planted", source)
    message = refusal(PluginInvalid)
    assert "Planted leaves abstract methods undefined: capabilities, child_env, device, " in message
    assert "probe" not in message
    assert message.endswith(", transport")


def test_a_method_that_the_interface_lacks_is_named_beside_missing_ones(install):
    source = """
        from spec_core import Optimizer

        class Planted(Optimizer):
            name, api_version = "planted", 1
            def construct(self, weights, map_whole): ...
    """
    install("spec-planted", source, group="optimizers")
    assert refusal(PluginInvalid, Optimizer).endswith(
        "Planted leaves abstract methods undefined: build; it defines construct, which spec_core.Optimizer lacks"
    )


@pytest.mark.parametrize(
    ("version", "what_to_do"),
    [
        (7, "older: pip install --upgrade spec-core spec-trainer, or install an older spec-planted"),
        (0, "newer: pip install --upgrade spec-planted"),
    ],
)
def test_another_api_version_is_named_with_what_to_upgrade(install, version, what_to_do):
    install("spec-planted", GOOD + f"        api_version = {version}\n")
    assert refusal(PluginApiMismatch) == (
        f"backend 'planted' of spec-planted 3.1 was written for version {version} of spec_core.Backend, this "
        f"spec-core accepts 1, which is {what_to_do}"
    )


def test_every_version_of_the_interfaces_range_loads(install, monkeypatch):
    monkeypatch.setattr(Backend, "API_VERSIONS", range(2, 5))
    install("spec-planted", GOOD + "        api_version = 3\n")
    assert plugins.load(Backend, "planted").api_version == 3
    monkeypatch.setattr(Backend, "API_VERSIONS", range(4, 7))
    assert "version 3 of spec_core.Backend, this spec-core accepts 4 to 6, which is newer" in refusal(
        PluginApiMismatch
    )


@pytest.mark.parametrize("version", ["2.0", "'2'"])
def test_api_version_that_is_no_integer_is_a_mismatch(install, version):
    install("spec-planted", GOOD + f"        api_version = {version}\n")
    assert f"states api_version={version}, this spec-core accepts 1; install a matching version" in refusal(
        PluginApiMismatch
    )


def test_missing_api_version_is_a_mismatch(install):
    source = """
        from spec_core import Draft

        class Planted(Draft):
            name = "planted"
            build = check_target = denominators = export = from_folder = proposer = required_features = None
    """
    install("spec-planted", source, group="drafts")
    assert "states no api_version" in refusal(PluginApiMismatch, Draft)


def test_name_must_be_the_entry_points(install):
    install("spec-planted", GOOD.replace('"planted"', '"else"'))
    message = refusal(PluginInvalid)
    assert "Planted.name is 'else'" in message


@pytest.mark.parametrize("config", ["dict", "EngineConfig", "BackendConfig()"])
def test_config_must_be_a_subclass_of_the_kinds_own(install, config):
    source = "    from spec_core import BackendConfig, EngineConfig\n" + GOOD + f"        Config = {config}\n"
    install("spec-planted", source)
    assert refusal(PluginInvalid).endswith("Planted.Config is not a subclass of BackendConfig")


@pytest.mark.parametrize("serving", ["7", "VllmServing"])
def test_serving_must_be_an_object_of_its_class(install, serving):
    source = f"""
        from spec_engine_hf.engine import HfEngine
        from spec_engine_vllm.serving import VllmServing

        class Planted(HfEngine):
            name = "planted"
            serving = {serving}
    """
    install("spec-planted", source, group="engines")
    message = refusal(PluginInvalid, Engine)
    assert message.endswith(
        "Planted.serving is neither None nor an object of a subclass of spec_core.Serving"
    )


@pytest.mark.parametrize(
    ("source", "cause"), [("exit(3)", "SystemExit: 3"), ("1 / 0", "ZeroDivisionError: division by zero")]
)
def test_probe_that_raises_is_the_plugins_fault(install, source, cause):
    install("spec-planted", GOOD + f"        probe = classmethod(lambda cls: {source})\n")
    assert refusal(PluginInvalid).endswith(f"its probe raised {cause}")


def test_probe_that_returns_nothing_is_the_plugins_fault(install):
    install("spec-planted", GOOD + "        probe = classmethod(lambda cls: None)\n")
    assert refusal(PluginInvalid).endswith("its probe returned None, expected Availability")


def test_probe_that_says_no_is_quoted(install):
    source = (
        GOOD
        + """
        @classmethod
        def probe(cls):
            from spec_core.records import Availability
            return Availability(ok=False, reason="no device; plug one in")
    """
    )
    install("spec-planted", source)
    assert plugins.load(Backend, "planted").name == "planted"
    message = refusal(PluginUnavailable)
    assert message == "backend 'planted' (spec-planted 3.1) cannot run here: no device; plug one in"


def test_every_plugin_error_is_bad_usage():
    assert {error.exit_code for error in PluginError.__subclasses__()} == {2}
    assert len(PluginError.__subclasses__()) == 6


def test_what_was_installed_since_the_last_look_is_found(install):
    folder = install("spec-planted")
    assert plugins.find(Backend, "planted").owner == "spec-planted 3.1"
    write_distribution(folder, "later", "[spec_core.backends]\nlater = spec_planted:Planted\n")
    assert plugins.find(Backend, "later").owner == "later 1.0"
    assert "spec_planted" in plugins.packages()
    sys.path.remove(str(folder))
    refusal(PluginNotFound, name="later")
