"""Files outside docs/ that a page links to become part of the site, so that it is whole offline.

Links in the pages are those of the repository: they lead to the same file on a code host.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[^)\s]*)?\))")
# Where what is outside docs/ lies on the site.
OUTSIDE = "repository"


def on_files(files: Any, config: Any) -> Any:
    """Add what is linked to, and what that links to."""
    from mkdocs.structure.files import File, InclusionLevel

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
    """Let its links lead to where the files are on the site."""
    here = page.file.src_uri
    path = repository_path(here)

    def lead(found: re.Match[str]) -> str:
        target = resolve(path, found[2])
        if not (ROOT / target).is_file():
            return found[0]
        there = posixpath.relpath(site_path(target), posixpath.dirname(here) or ".")
        return found[1] + there + found[3]

    return LINK.sub(lead, markdown)


def linked(path: str) -> list[str]:
    """The files of the repository that the page at ``path`` links to."""
    page = ROOT / path
    if not page.is_file():
        return []
    found = (resolve(path, link[2]) for link in LINK.finditer(page.read_text(encoding="utf-8")))
    return [target for target in found if (ROOT / target).is_file()]


def resolve(path: str, link: str) -> str:
    """The path in the repository that ``link`` on the page at ``path`` means."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))


def site_path(path: str) -> str:
    """The path on the site of the file at ``path`` in the repository."""
    parts = PurePosixPath(path).parts
    return "/".join(parts[1:] if parts[0] == "docs" else (OUTSIDE, *parts))


def repository_path(path: str) -> str:
    """The reverse of :func:`site_path`."""
    parts = PurePosixPath(path).parts
    return "/".join(parts[1:] if parts[0] == OUTSIDE else ("docs", *parts))
