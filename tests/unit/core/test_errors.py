"""The tree in the docstring is the tree of the classes; exit codes follow it."""

import inspect
import pickle

import pytest

from spec_core import errors
from spec_core.errors import RunError, SpecError, UsageError

CLASSES = [
    member
    for _, member in inspect.getmembers(errors, inspect.isclass)
    if member.__module__ == errors.__name__
]


def drawn_tree() -> dict[str, str]:
    """Class -> parent, from the indentation of the drawing."""
    parents: dict[str, str] = {}
    above: list[tuple[int, str]] = []
    for line in inspect.getdoc(errors).splitlines():
        name = line.lstrip(" │├└─").partition(" ")[0]
        if not hasattr(errors, name) or not line.startswith((" ", "│", "├", "└")):
            continue
        depth = line.index(name)
        above = [(other, parent) for other, parent in above if other < depth]
        parents[name] = above[-1][1] if above else "Exception"
        above.append((depth, name))
    return parents


def test_drawing_equals_the_classes():
    own = {member: next(b for b in member.__mro__[1:] if b in {*CLASSES, Exception}) for member in CLASSES}
    assert drawn_tree() == {member.__name__: base.__name__ for member, base in own.items()}


def test_everything_is_a_usage_error_or_a_run_error():
    leaves = [member for member in CLASSES if member is not SpecError]
    assert all(issubclass(member, UsageError) != issubclass(member, RunError) for member in leaves)


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.__name__)
def test_exit_code_is_2_for_usage_and_1_for_runs(error):
    assert error.exit_code == (2 if issubclass(error, UsageError) else 1)


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.__name__)
def test_errors_survive_the_way_between_processes(error):
    raised = pickle.loads(pickle.dumps(error("what is wrong")))
    assert type(raised) is error
    assert str(raised) == "what is wrong"


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.ConfigError, ValueError),
        (errors.PluginImportFailed, ImportError),
        (errors.DeadlineExceeded, TimeoutError),
        (errors.PeerLost, ConnectionError),
        (errors.EngineError, RuntimeError),
    ],
)
def test_callers_that_know_only_python_can_catch_them(error, builtin):
    with pytest.raises(builtin):
        raise error("what is wrong")
