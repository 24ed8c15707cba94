"""Kernels and types of targets that distributions add, and the words about those that are wrong."""

import pytest

from spec_backend_cpu.backend import CpuBackend
from spec_core import Backend, TargetType, plugins
from spec_core.errors import PluginConflict, PluginImportFailed, PluginInvalid

from .conftest import GOOD


def kernel_of(name: str) -> object:
    """Return the kernel that a backend whose devices are CPUs finds."""
    return plugins.find_kernel(CpuBackend(CpuBackend.Config()))(name)


DOUBLE = "def Planted(x):\n    return 2 * x\n"


def test_a_distribution_brings_a_kernel_for_a_type_of_device(install):
    install("spec-planted", DOUBLE, name="cpu:twice", group="kernels")
    install("spec-elsewhere", "1 / 0", name="npu:twice", group="kernels")
    assert kernel_of("twice")(4) == 8
    assert kernel_of("thrice") is None
    assert plugins.unknown_groups() == []


def test_the_backends_own_kernel_comes_first(install):
    install("spec-planted", "1 / 0", name="cpu:causal_attention", group="kernels")
    assert kernel_of("causal_attention") is CpuBackend(CpuBackend.Config()).kernel("causal_attention")


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("1 / 0", PluginImportFailed, " does not import (spec_planted:Planted): ZeroDivisionError: "),
        ("Planted = 3", PluginInvalid, ": spec_planted:Planted is no function"),
    ],
)
def test_a_kernel_that_is_none_is_named(install, source, error, message):
    install("spec-planted", source, name="cpu:twice", group="kernels")
    with pytest.raises(error) as raised:
        kernel_of("twice")
    assert str(raised.value).startswith(f"kernel 'cpu:twice' of spec-planted 3.1{message}")


GIANT = """
    from spec_core import TargetType

    Planted = TargetType(norm="rms_plus_one", embedding_scale=lambda values: values.number("scale", default=2.0))
"""


def target_type_of(name: str, **own: TargetType | str) -> TargetType | str | None:
    return plugins.find_target_type(name, own)


def test_a_distribution_adds_a_type_of_target(install):
    install("spec-planted", GIANT, name="giant", group="target_types")
    assert target_type_of("giant").norm == "rms_plus_one"
    assert target_type_of("dwarf") is None
    assert plugins.unknown_groups() == []


def test_a_type_of_target_may_name_its_text_models(install):
    install("spec-planted", "Planted = 'llama'", name="giant", group="target_types")
    assert target_type_of("giant") == "llama"


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("1 / 0", PluginImportFailed, " does not import (spec_planted:Planted): ZeroDivisionError: "),
        (
            "Planted = {}",
            PluginInvalid,
            ": spec_planted:Planted is no spec_core.TargetType, nor the type of a text model",
        ),
        (
            GIANT.replace("rms_plus_one", "rsm"),
            PluginImportFailed,
            " does not import (spec_planted:Planted): ValidationError: norm: Input should be 'rms', ",
        ),
        (
            GIANT.replace("norm=", "nrom="),
            PluginImportFailed,
            " does not import (spec_planted:Planted): ValidationError: nrom: Unexpected keyword argument",
        ),
    ],
    ids=["failing", "other", "norm", "argument"],
)
def test_a_type_of_target_that_is_none_is_named(install, source, error, message):
    install("spec-planted", source, name="giant", group="target_types")
    with pytest.raises(error) as raised:
        target_type_of("giant")
    assert str(raised.value).startswith(f"target_type 'giant' of spec-planted 3.1{message}")
    (record,) = [record for record in plugins.listed() if record.name == "giant"]
    assert plugins.status(record) == ("broken", str(raised.value), None)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("None", "Input should be a valid number"),
        ("float('nan')", "Input should be a finite number"),
    ],
)
def test_a_function_of_a_type_of_target_that_fails_is_the_plugins_fault(install, returned, message):
    install(
        "spec-planted",
        GIANT.replace('values.number("scale", default=2.0)', returned),
        name="giant",
        group="target_types",
    )
    with pytest.raises(PluginInvalid) as raised:
        target_type_of("giant").embedding_scale(None)
    expected = f"target_type 'giant' of spec-planted 3.1: its embedding_scale fails: {message}"
    assert str(raised.value) == expected


def test_a_type_of_target_that_is_known_already_is_refused(install):
    install("spec-planted", GIANT, name="giant", group="target_types")
    with pytest.raises(
        PluginConflict, match=r"^target_type 'giant' of spec-planted 3\.1: this type is known"
    ):
        target_type_of("giant", giant=TargetType())


@pytest.mark.parametrize(
    ("kind", "name", "source", "find"),
    [
        ("backend", "planted", GOOD, lambda: plugins.load(Backend, "planted")),
        ("kernel", "cpu:twice", DOUBLE, lambda: kernel_of("twice")),
        ("target_type", "giant", GIANT, lambda: target_type_of("giant")),
    ],
)
def test_two_distributions_with_one_name_are_both_named(install, kind, name, source, find):
    for distribution in ("spec-planted", "another-planted"):
        install(distribution, source, name=name, group=f"{kind}s")
    with pytest.raises(PluginConflict) as raised:
        find()
    assert str(raised.value) == (
        f"{kind} '{name}' is provided by another-planted 3.1 and spec-planted 3.1; uninstall one of them"
    )
