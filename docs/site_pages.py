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


def on_config(config: Any) -> Any:
    """Fill each section of the menu that names a folder with the pages of that folder, sorted by name."""
    pages = [page.relative_to(config.docs_dir).as_posix() for page in Path(config.docs_dir).rglob("*.md")]
    for section in config.nav:
        for title, folder in section.items():
            if isinstance(folder, str) and folder.endswith("/"):
                section[title] = sorted(page for page in [*pages, *_api_pages()] if page.startswith(folder))
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the copies, and a page of the public names of each shared package and library, from their docstrings."""
    copies = {page: (ROOT / source).read_text() for page, source in COPIES.items()}
    for page, content in (copies | _api_pages()).items():
        files.append(File.generated(config, page, content=content))
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


def _api_pages() -> dict[str, str]:
    """Return page -> text, for each shared package and library and for the modules that plugins import by name."""
    inits = [init for folder in SHARED for init in folder.rglob("__init__.py")]
    sources = {
        init.parent.relative_to(ROOT).as_posix().partition("/src/")[2].replace("/", "."): init
        for init in inits
    }
    pages = {f"api/{package}.md": _api_page(package, init) for package, init in sources.items()}
    modules = ("spec_core.errors", "spec_core.records")
    return pages | {f"api/{module}.md": f"# {module}\n\n::: {module}\n" for module in modules}


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
