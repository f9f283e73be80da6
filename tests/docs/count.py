"""Size of the site, and what its tests execute: ``python -m tests.docs.count``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from tests.docs.pages import ROOT, all_pages


def site_pages() -> Iterator[Path]:
    """Pages of the site without the reference of names."""
    docs = ROOT / "docs"
    pages = sorted([*docs.rglob("*.md"), *docs.rglob("*.ipynb")])
    return (page for page in pages if docs / "reference" not in page.parents)


def words(page: Path) -> int:
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    return len(text.split())


def main() -> None:
    sizes = {page.relative_to(ROOT).as_posix(): words(page) for page in site_pages()}
    blocks = [block for page in all_pages() for block in page.blocks]
    snippets = [block for block in blocks if block.is_snippet and not block.skipped]
    commands = [pair for block in blocks for pair in block.commands]
    ran = [pair for block in blocks if block.runs for pair in block.commands]
    counted = {
        "words": sum(sizes.values()),
        "pages": len(sizes),
        "words_of_longest": max(sizes.values()),
        "blocks": len(blocks),
        "snippets_run": len(snippets),
        "snippets_hidden": sum(block.said == "hidden" for block in snippets),
        "files": sum(bool(block.file) and not block.skipped for block in blocks),
        "skipped": sum(bool(block.skipped) for block in blocks),
        "commands": len(commands),
        "commands_run": len(ran),
        "outputs_compared": sum(bool(shown) for _, shown in ran),
    }
    print(json.dumps(counted, indent=2))


if __name__ == "__main__":
    main()
