"""Installs packages into the environment of this Python: ``python .ci/install.py`` with the words of ``pip install``.

uv does it, several times as fast as pip, with links to one copy of each file. It does not read pip's configuration,
so it is told what of that matters here. pip does it itself where uv cannot be had, where its configuration says
something else, and where uv fails.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys

FLAGS = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "constraint": "--constraint",
    "trusted-host": "--allow-insecure-host",
}
"""pip's keys, each a list with blanks between, and uv's flag for one of them."""
OF_PIP_ALONE = {
    "break-system-packages",
    "cache-dir",
    "cert",
    "compile",
    "config-file",
    "default-timeout",
    "disable-pip-version-check",
    "no-cache-dir",
    "no-compile",
    "no-input",
    "no-warn-script-location",
    "prefer-binary",
    "progress-bar",
    "quiet",
    "require-virtualenv",
    "retries",
    "root-user-action",
    "timeout",
}
"""Keys that do not change what is installed from where. ``cert`` goes to uv in a variable."""


def uv_flags(configuration: str) -> list[str] | None:
    """Return the flags by which uv does what pip's configuration asks for; None where it asks for something else.

    ``configuration`` is what ``pip config list`` prints. An environment variable replaces what files say.
    """
    values: dict[str, str] = {}
    for line in configuration.splitlines():
        name, _, value = line.partition("=")
        scope, _, key = name.rpartition(".")
        if scope in ("global", "install", ":env:"):
            values[key] = ast.literal_eval(value)
    if values.keys() - FLAGS - OF_PIP_ALONE:
        return None
    flags = [
        word for key, flag in FLAGS.items() for value in values.get(key, "").split() for word in (flag, value)
    ]
    # pip takes the best version of all indexes, uv by itself that of the first.
    return [*flags, "--index-strategy", "unsafe-best-match"]


def main(words: list[str]) -> int:
    """Install by uv or else by pip; return pip's exit code."""
    pip = [sys.executable, "-m", "pip"]
    asked = subprocess.run([*pip, "config", "list"], capture_output=True, text=True, check=True)
    flags = uv_flags(asked.stdout)
    if flags is not None and _has_uv(pip):
        uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", sys.executable]
        certificates = os.environ.get("PIP_CERT") or os.environ.get("REQUESTS_CA_BUNDLE")
        environment = {**({"SSL_CERT_FILE": certificates} if certificates else {}), **os.environ}
        if subprocess.run([*uv, *flags, *words], env=environment, check=False).returncode == 0:
            return 0
        print("uv cannot install this; pip tries", file=sys.stderr)
    return subprocess.run([*pip, "install", "--quiet", "--no-compile", *words], check=False).returncode


def _has_uv(pip: list[str]) -> bool:
    install = [*pip, "install", "--quiet", "--no-compile", "uv>=0.8"]
    return subprocess.run(install, capture_output=True, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
