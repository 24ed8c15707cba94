"""Builds the six shared libraries that torch_npu needs instead of CANN into a folder: ``build(folder)``.

Which symbols torch_npu wants is read from the installed torch_npu; those that ``src`` does not define become
functions that say so and return an error. Needs gcc; takes about a second, nothing when all is built.
"""

import contextlib
import hashlib
import importlib.util
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from elf import undefined_symbols

SOURCES = Path(__file__).resolve().parent / "src"
PARTS = {
    "libascendcl.so": [
        *("control.c", "device.c", "memory.c", "stream.c", "ipc_event.c", "ipc_memory.c"),
        *("operators.c", "diagnostics.c"),
    ],
    "libhccl.so": ["hccl_communicator.c", "hccl_collectives.c", "reduction.c"],
    "libacl_op_compiler.so": ["compiler.c"],
    "libge_runner.so": [],
    "libgraph.so": [],
    "libacl_tdt_channel.so": [],
}
WANTED = re.compile(r"^(acl|rt|Msprof|Hccl)[a-z]*[A-Z]\w*$")
MISSING = """
int {name}(void) {{
    fprintf(stderr, "[fake cann] {name} is not implemented\\n");
    return 207000; /* ACL_ERROR_RT_FEATURE_NOT_SUPPORT */
}}
"""


def wanted_symbols() -> set[str]:
    """Names that the installed torch_npu's libraries leave to CANN; empty without torch_npu."""
    found = importlib.util.find_spec("torch_npu")
    if found is None or not found.submodule_search_locations:
        return set()
    root = Path(found.submodule_search_locations[0])
    libraries = [*root.glob("_C*.so"), root / "lib/libtorch_npu.so", root / "lib/libtensorpipe.so"]
    names = set().union(*map(undefined_symbols, libraries))
    return {name for name in names if WANTED.match(name)}


def defined_names() -> set[str]:
    """Functions that the sources define."""
    text = "\n".join(file.read_text() for file in SOURCES.glob("*.c"))
    return set(re.findall(r"^\w[\w *]*?\b(\w+)\(", text, re.MULTILINE))


def build(folder: Path) -> Path:
    """The folder with the libraries for the installed torch_npu and these sources; it appears whole or not at all."""
    missing = sorted(wanted_symbols() - defined_names())
    state = "".join(missing) + "".join(file.read_text() for file in sorted(SOURCES.iterdir()))
    into = folder / hashlib.sha256((state + Path(__file__).read_text()).encode()).hexdigest()[:12]
    if not into.exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".gitignore").write_text("*\n")
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            _fill(Path(scratch), missing)
            with contextlib.suppress(OSError):  # another process was faster
                Path(scratch).rename(into)
            Path(scratch).mkdir(exist_ok=True)
    return into


def _fill(folder: Path, missing: list[str]) -> None:
    stubs = folder / "missing.c"
    stubs.write_text("#include <stdio.h>\n" + "".join(MISSING.format(name=name) for name in missing))
    for name, files in PARTS.items():
        sources = [SOURCES / file for file in files] + ([stubs] if name == "libascendcl.so" else [])
        _compile(folder / name, sources)
    _make_home(folder / "home")


def _make_home(home: Path) -> None:
    """Make the files that torch_npu and others look for where CANN is installed."""
    for name in ("runtime", "compiler", "opp", "any-linux"):
        (home / name).mkdir(parents=True, exist_ok=True)
    (home / "any-linux/ascend_toolkit_install.info").write_text("package_name=stand-in\nversion=8.3.RC1\n")


def _compile(library: Path, sources: list[Path]) -> None:
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-Wno-format-truncation", "-pthread"]
    needs = [f"-L{library.parent}", "-l:libascendcl.so"] if library.name == "libhccl.so" else []
    files = [str(source) for source in sources] or ["-x", "c", "/dev/null"]
    command = ["gcc", *flags, f"-Wl,-soname,{library.name}", "-o", str(library), *files, *needs]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
