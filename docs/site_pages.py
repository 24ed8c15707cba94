"""Hooks of the documentation site: pages made of files elsewhere in the repository, and links that leave docs/."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.structure.files import Files

ROOT = Path(__file__).parents[1]
SHARED = [ROOT / f"packages/{name}/src/spec_{name}" for name in ("core", "processes", "kit", "testing")]
"""Packages whose names plugins use."""
COPIES = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
"""Page of the site -> the file at the root that it shows."""
_LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the copies, and a page of the public names of each shared package and library, from their docstrings."""
    for page, source in COPIES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    inits = [init for folder in SHARED for init in sorted(folder.rglob("__init__.py"))]
    for init in inits:
        package = init.parent.relative_to(ROOT).as_posix().partition("/src/")[2].replace("/", ".")
        files.append(File.generated(config, f"api/{package}.md", content=_api_page(package, init)))
    for module in ("spec_core.errors", "spec_core.records"):
        files.append(File.generated(config, f"api/{module}.md", content=f"# {module}\n\n::: {module}\n"))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links of a copy to the pages; name a file of the repository that is no page, which must be there."""
    source = COPIES.get(page.file.src_uri)
    place = ROOT if source else (ROOT / "docs" / page.file.src_uri).parent

    def point(match: re.Match[str]) -> str:
        text, link, anchor = match[1], match[2], match[3] or ""
        file = (place / link).resolve()
        if not file.is_relative_to(ROOT):
            return match[0]
        path = file.relative_to(ROOT)
        copies = {copied: uri for uri, copied in COPIES.items()}
        uri = copies.get(str(path)) or (str(path.relative_to("docs")) if path.parts[0] == "docs" else None)
        if uri and file.suffix in {".md", ".png"}:
            up = "../" * page.file.src_uri.count("/")
            return f"[{text}]({up}{uri}{anchor})"
        return f"{text} (`{path}`)" if file.exists() else match[0]

    return _LINK.sub(point, markdown)


def _api_page(package: str, init: Path) -> str:
    """Return a page of the names that ``init`` takes from its modules, each under its module's docstring."""
    lines = [f"# {package}"]
    for node in ast.walk(ast.parse(init.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(f"{package}."):
            if node.module == "spec_kit.lazy":
                continue
            names = ", ".join(alias.name for alias in node.names)
            lines.append(f"::: {node.module}\n    options:\n      members: [{names}]\n      heading_level: 2")
    return "\n\n".join(lines) + "\n"
