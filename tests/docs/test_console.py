"""The commands of every page: marked ones run, all others are parsed by the program they start."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests import warm
from tests.docs.commands import understand
from tests.docs.pages import ROOT, Block, Page, all_pages
from tests.docs.sessions import run_session

PAGES = [page for page in all_pages() if any(b.language == "console" for b in page.blocks)]
BLOCKS = [block for page in PAGES for block in page.blocks if block.language == "console"]
LIMIT_S = 240.0
# Commands are searched here first: this installation, and stand-ins for Slurm's.
FIRST = (Path(sys.executable).parent, Path(__file__).parent / "slurm")


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_commands_are_understood(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert block.commands, f"{block}: no line begins with '$ '"
    files = {other.file for page in PAGES if page.path == block.page for other in page.blocks}
    for command, _ in block.commands:
        understand(command, files - {""})


@pytest.mark.parametrize(
    "page", [p for p in PAGES if any(b.runs for b in p.blocks)], ids=lambda page: page.path
)
def test_commands_run(page: Page, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([*map(str, (warm.folder(), *FIRST)), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "HOME": str(tmp_path),
    }
    blocks = [block for block in page.blocks if block.runs or (block.file and not block.skipped)]
    run_session(blocks, tmp_path, environment, LIMIT_S)
