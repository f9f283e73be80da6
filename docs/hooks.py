"""Add files outside docs/ to which pages link, so that the site is complete offline.

The pages link to paths in the repository, so the same links work on a code host.
"""

from __future__ import annotations

import json
import posixpath
import re
from html import escape, unescape
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[^)\s]*)?\))")
# Placeholder for all layers of the gpudist.nn modules with these prefixes.
LAYERS_OF = re.compile(r"<!-- layers: (.+) -->")
# Console block, a tag, and the prompt of a command or of its next line.
CONSOLE = re.compile(r'<div class="highlight">(<pre>.*?</pre>)</div>', re.DOTALL)
TAG = re.compile(r"<[^>]+>")
PROMPT = re.compile(r'(?:<pre>|<code>|<span></span>)*<span class="gp">[$>] ?</span>')
# Folder on the site for files outside docs/.
OUTSIDE = "repository"


def on_files(files: Any, config: Any) -> Any:
    """Add the files to which pages link, and the files to which these link."""
    from mkdocs.structure.files import File, InclusionLevel

    for notebook in sorted((ROOT / "docs").glob("*.ipynb")):
        page = File.generated(config, f"{notebook.stem}.md", content=notebook_page(notebook))
        files.append(page)
    added: set[str] = set()
    waiting = [f"docs/{page.src_uri}" for page in files.documentation_pages()]
    while waiting:
        for target in linked(waiting.pop()):
            if target in added or target.startswith("docs/"):
                continue
            added.add(target)
            files.append(
                File.generated(
                    config,
                    site_path(target),
                    abs_src_path=str(ROOT / target),
                    inclusion=InclusionLevel.NOT_IN_NAV,
                )
            )
            if target.endswith(".md"):
                waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the page's links to the files' places on the site."""
    here = page.file.src_uri
    # Measurements and lists of layers name everything, and would come first in the search.
    if here.startswith((OUTSIDE, "reference/layers_")):
        page.meta.setdefault("search", {"boost": 0.02})
    path = repository_path(here)

    def lead(found: re.Match[str]) -> str:
        target = resolve(path, found[2])
        if not (ROOT / target).is_file():
            return found[0]
        there = posixpath.relpath(site_path(target), posixpath.dirname(here) or ".")
        return found[1] + there + found[3]

    return LINK.sub(lead, with_operators(with_layers(markdown)))


def on_page_content(content: str, **_: Any) -> str:
    """Make the copy button of a console block copy its commands alone."""

    def lead(found: re.Match[str]) -> str:
        commands = commands_of(found[1])
        if not commands:
            return found[0]
        copied = escape("\n".join(commands))
        return f'<div class="highlight" data-copy="{copied}">{found[1]}</div>'

    return CONSOLE.sub(lead, content)


def commands_of(block: str) -> list[str]:
    """Return the commands of a highlighted console block, without prompts and output."""
    prompts = ((PROMPT.match(line), line) for line in block.splitlines())
    return [unescape(TAG.sub("", line[p.end() :])) for p, line in prompts if p is not None]


def with_layers(markdown: str) -> str:
    """Insert a reference entry for every layer of the modules that ``markdown`` names."""
    from gpudist.nn import LAYERS

    def entries(found: re.Match[str]) -> str:
        words = found[1].split()
        wanted = tuple(f"gpudist.nn.{word}" for word in words if word[0] != "!")
        others = tuple(f"gpudist.nn.{word[1:]}" for word in words if word[0] == "!")
        modules = {row.name: row.kind.__module__ for row in LAYERS}
        names = [n for n, m in modules.items() if m.startswith(wanted) and not m.startswith(others)]
        return "\n\n".join(f"::: gpudist.nn.{name}" for name in names)

    return LAYERS_OF.sub(entries, markdown)


def with_operators(markdown: str) -> str:
    """Insert the table of operators, or their reference entries, at the placeholders."""
    import gpudist
    from gpudist.ops import OPERATORS

    rows = [f"| `{r.name}` | `{r.kind.__name__}` | `{r.adjoint}` |" for r in OPERATORS]
    table = "\n".join(["| function | module | adjoint |", "|---|---|---|", *rows])
    functions: list[str] = []
    modules: list[str] = []
    for row in OPERATORS:
        room = "gpudist" if hasattr(gpudist, row.name) else "gpudist.ops"
        functions.append(
            f"::: {row.kind.__module__}.{row.name}\n    options: {{heading: {room}.{row.name}}}"
            # A module has the name of its only function, which shadows it.
            if row.kind.__module__.endswith(f".{row.name}")
            else f"::: {room}.{row.name}"
        )
        name = row.kind.__name__
        modules.append(f"::: gpudist.{'nn' if hasattr(gpudist.nn, name) else 'ops'}.{name}")
    for of, text in {
        "": table, ": functions": "\n\n".join(functions), ": modules": "\n\n".join(modules)
    }.items():  # fmt: skip
        markdown = markdown.replace(f"<!-- operators{of} -->", text)
    return markdown


def notebook_page(path: Path) -> str:
    """Return the notebook's cells and what they print, as a page."""
    parts: list[str] = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        is_code = cell["cell_type"] == "code"
        parts.append(f"```python\n{text}\n```" if is_code else text)
        printed = "".join("".join(each.get("text", "")) for each in cell.get("outputs", []))
        if printed:
            parts.append(f"```text\n{printed}```")
    parts.insert(1, f"This page is [{path.name}]({path.name}).")
    return "\n\n".join(parts)


def linked(path: str) -> list[str]:
    """Return the files of the repository that the page at ``path`` links to."""
    page = ROOT / path
    if not page.is_file():
        return []
    found = (resolve(path, link[2]) for link in LINK.finditer(page.read_text(encoding="utf-8")))
    return [target for target in found if (ROOT / target).is_file()]


def resolve(path: str, link: str) -> str:
    """Return the path in the repository that ``link`` on the page at ``path`` refers to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))


def site_path(path: str) -> str:
    """Return the path on the site of the file at ``path`` in the repository."""
    parts = PurePosixPath(path).parts
    return "/".join(parts[1:] if parts[0] == "docs" else (OUTSIDE, *parts))


def repository_path(path: str) -> str:
    """Invert :func:`site_path`."""
    parts = PurePosixPath(path).parts
    return "/".join(parts[1:] if parts[0] == OUTSIDE else ("docs", *parts))
