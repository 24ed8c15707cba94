"""Every place that starts a process, and why no Python that it starts imports from the working directory.

Anybody may have put a module there. ``spec_processes.leave_out_working_directory`` sets PYTHONSAFEPATH where a
command begins, ``spawn_on`` for each worker; what these start inherits it. That covers libraries, which start Python
as LIBRARIES says. Whole runs are traced in ``tests/integration``: their working directory is a folder of traps.
"""

import ast
import re

import pytest

from .sources import ROOT, SOURCES, text, tree, walked

INHERITS = "inherits PYTHONSAFEPATH from the command or worker that it is called in"
SETS = "sets PYTHONSAFEPATH, -P or -I for its child"
NO_PYTHON = "starts a program that is no Python"
TEST = "runs in tests alone, in whatever directory their author has chosen"

STARTS = {
    ("apps/trainer/src/spec_trainer/cli/commands/own_process.py", "get_context"): INHERITS,
    ("apps/trainer/src/spec_trainer/data/row_encoder.py", "ProcessPoolExecutor"): INHERITS,
    ("apps/trainer/src/spec_trainer/data/row_encoder.py", "multiprocessing.get_context"): INHERITS,
    ("apps/trainer/src/spec_trainer/cli/commands/plugins.py", "subprocess.run"): INHERITS,
    ("apps/trainer/src/spec_trainer/live/own_server.py", "subprocess.Popen"): SETS,
    ("packages/backend-cuda/src/spec_backend_cuda/mps.py", "subprocess.Popen"): SETS,
    ("packages/backend-cuda/src/spec_backend_cuda/mps_owner.py", "subprocess.call"): SETS,
    ("packages/backend-cuda/src/spec_backend_cuda/mps_owner.py", "subprocess.run"): NO_PYTHON,
    ("packages/processes/src/spec_processes/reaper.py", "subprocess.Popen"): SETS,
    ("packages/processes/src/spec_processes/spawn.py", "subprocess.Popen"): SETS,
    ("packages/processes/src/spec_processes/torch_extensions.py", "os.execve"): INHERITS,
    ("packages/testing/src/spec_testing/conformance.py", "subprocess.run"): TEST,
    ("packages/testing/src/spec_testing/launcher_suite.py", "subprocess.Popen"): TEST,
    ("packages/testing/src/spec_testing/processes.py", "multiprocessing.get_context"): TEST,
    ("packages/testing/src/spec_testing/toy_workers.py", "subprocess.Popen"): NO_PYTHON,
    ("packages/launcher-ray/src/spec_launcher_ray/connection.py", "ray.init"): SETS,
}

LIBRARIES = {
    "multiprocessing": "resource tracker, spawn and fork servers: python -c, with the parent's sys.path",
    "torch": "inductor's compile workers and its look at the processor: a file or -c, with PYTHONPATH=sys.path",
    "ray": "agents, monitors, workers: files of Ray; its workers get the driver's directory unless told otherwise",
    "vllm": "EngineCore and its workers: multiprocessing; the look at a model's class: python -m",
    "sglang": "scheduler, detokenizer: multiprocessing",
}
"""Library -> how it starts Python; all hand on the environment."""

CALLS = re.compile(
    r"(subprocess\.)?(Popen|check_call|check_output|getoutput|getstatusoutput)|subprocess\.(run|call)"
    r"|(multiprocessing\.|mp\.)?(get_context|ProcessPoolExecutor|Process|Pool|Manager|set_start_method)"
    r"|(concurrent\.)?(futures\.)?ProcessPoolExecutor"
    r"|os\.(exec|spawn|posix_spawn|popen|system|fork|startfile)\w*"
    r"|(asyncio\.)?create_subprocess_\w+|pty\.\w+|ray\.init"
)


def starts(module: ast.Module) -> set[str]:
    """Names of the calls that start a process."""
    names = (ast.unparse(node.func) for node in walked(module) if isinstance(node, ast.Call))
    return {name for name in names if CALLS.fullmatch(name)}


def test_every_start_of_a_process_is_listed_with_its_reason():
    """And none stays in the list that is not there any more."""
    found = {(str(file.relative_to(ROOT)), name) for file in SOURCES for name in starts(tree(file))}
    assert found == STARTS.keys()


def test_who_says_python_itself_is_listed_too():
    """A command that is made in one place and started in another."""
    found = {str(file.relative_to(ROOT)) for file in SOURCES if "sys.executable" in text(file)}
    assert found <= {file for file, _ in STARTS}


@pytest.mark.parametrize(
    "code",
    [
        "subprocess.run(['python'])",
        "Popen([sys.executable])",
        "multiprocessing.get_context('spawn').Process(target=f)",
        "mp.Process(target=f)",
        "with ProcessPoolExecutor() as pool: pass",
        "os.execv(sys.executable, [])",
        "os.posix_spawnp('python', [], {})",
        "os.system('python')",
        "asyncio.create_subprocess_exec('python')",
    ],
)
def test_a_new_start_would_be_found(code):
    assert starts(ast.parse(code))
