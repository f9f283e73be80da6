"""Pages and their code blocks, with the comments that state how to test them.

Comments in a page, hidden from its readers:

``<!-- test ranks=4 -->``
    the Python blocks of this page run in order, in one namespace, on 4 threads that have
    ``P_world``; with ``launcher=torchrun``, in 4 processes that torchrun starts.
``<!-- test hidden``, code, ``-->``
    Python that runs at this place.
``<!-- test run -->``
    runs the commands of the next block, and compares the output that the block shows. Other
    commands are only parsed by the program they start.
``<!-- test skip: REASON -->``
    the next block does not run here.

The cells of a notebook run in order and print what the file has.

A Python block that begins with ``# NAME.py`` is a file, for the commands that follow.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import CodeType

ROOT = Path(__file__).resolve().parents[2]
# Templates of generators, and what is for who runs the tests of a folder.
OTHERS = re.compile(r".*/page\.md|tests/.*/README\.md")
PART = re.compile(
    r"^<!-- test (?P<said>.*?)-->$|^```(?P<language>\S*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
FILE = re.compile(r"# ([\w.]+\.(?:py|sh))\n|#!/bin/bash\n# ([\w.]+\.sh)\n")


@dataclass(frozen=True)
class Block:
    """A block of code, or hidden Python.

    Attributes:
        page: path of its page in the repository.
        line: of the page, after which its text begins.
        language: after the fence.
        said: of its test; empty where nothing is.
        printed: by the cell of a notebook, when it ran last.
    """

    page: str
    line: int
    language: str
    text: str
    said: str
    printed: str = ""

    @property
    def skipped(self) -> str:
        """Reason to skip the block; empty if it runs."""
        return self.said.removeprefix("skip:").strip() if self.said.startswith("skip:") else ""

    @property
    def runs(self) -> bool:
        return self.said == "run"

    @property
    def file(self) -> str:
        """The name of the file it is, if it is one."""
        found = FILE.match(self.text)
        return (found[1] or found[2]) if found else ""

    @property
    def is_snippet(self) -> bool:
        """Whether this is Python but not a file."""
        return self.language == "python" and not self.file

    @cached_property
    def commands(self) -> list[tuple[str, str]]:
        """Return a console block's commands, without comments, each with its output as shown."""
        if self.language != "console":
            return []
        parts = re.split(r"^\$ ", self.text, flags=re.MULTILINE)[1:]
        pairs = (part.partition("\n") for part in parts)
        return [(re.sub(r"\s{2,}#.*", "", command), shown) for command, _, shown in pairs]

    def code(self, joined: str = "gpudist.init()") -> CodeType:
        """Compiled, with the line numbers of the page, and ``joined`` in place of the world."""
        text = self.text.replace("gpudist.init()", joined)
        return compile("\n" * self.line + text, str(ROOT / self.page), "exec")

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Page:
    """A page: its blocks, and how many ranks its snippets run on."""

    path: str
    blocks: tuple[Block, ...]
    ranks: int = 1
    launcher: str = ""

    @property
    def snippets(self) -> list[Block]:
        return [block for block in self.blocks if block.is_snippet and not block.skipped]


def read(path: str) -> Page:
    """Return the page at ``path`` in the repository."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".ipynb"):
        return Page(path, tuple(notebook_blocks(path, text)))
    blocks: list[Block] = []
    settings: dict[str, str] = {}
    said = ""
    for part in PART.finditer(text):
        line = text.count("\n", 0, part.start()) + 1
        words = (part["said"] or "").strip()
        if words.startswith("hidden"):
            code = words.removeprefix("hidden").lstrip("\n")
            blocks.append(Block(path, line, "python", code, "hidden"))
        elif words.startswith("ranks="):
            settings = dict(word.split("=") for word in words.split())
        elif words:
            said = words
        else:
            blocks.append(Block(path, line, part["language"], part["text"], said))
            said = ""
    assert not said, f"{path}: <!-- test {said} --> is before no block"
    return Page(path, tuple(blocks), int(settings.get("ranks", 1)), settings.get("launcher", ""))


def notebook_blocks(path: str, text: str) -> Iterator[Block]:
    """Return the cells with code; the line is that of the cell's id in the file."""
    for cell in json.loads(text)["cells"]:
        if cell["cell_type"] == "code":
            line = text[: text.index(f'"id": "{cell["id"]}"')].count("\n") + 1
            said = "".join("".join(each["text"]) for each in cell["outputs"])
            yield Block(path, line, "python", "".join(cell["source"]), "", said)


def all_pages() -> list[Page]:
    """README.md, docs/, and the pages of results beside what makes them, if they have code."""
    folders = [ROOT / name for name in ("docs", "benchmarks", "tests")]
    paths = [path for folder in folders for path in sorted(folder.rglob("*.md"))]
    paths += sorted((ROOT / "docs").rglob("*.ipynb"))
    names = ["README.md", *(path.relative_to(ROOT).as_posix() for path in paths)]
    pages = [read(name) for name in names if not OTHERS.fullmatch(name)]
    return [page for page in pages if page.blocks]
