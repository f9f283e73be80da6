"""The Python blocks of every page run as written; those that cannot run here are compiled."""

from __future__ import annotations

import os
import subprocess
from contextlib import nullcontext, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from gpudist.testing import run_distributed
from gpudist.world.partition import Partition
from tests import warm
from tests.docs.commands import is_script
from tests.docs.pages import ROOT, Block, Page, all_pages

PAGES = all_pages()
LANGUAGES = {"python", "console", "bash", "text", "json"}
LIMIT_S = 120.0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.path)
def test_blocks_are_told_apart(page: Page) -> None:
    """Each block has a known language, and is run or gives a reason why not."""
    for block in page.blocks:
        assert block.language in LANGUAGES, f"{block}: {block.language!r}"
        if block.language == "python":
            assert block.code()
        if block.language == "bash":
            assert is_script(block.text), f"{block} is not a script"
        if block.file and not block.skipped:
            others = (other for other in page.blocks if other.runs or other.file)
            uses = (other.text for other in others if other is not block)
            assert Path(block.file).stem in " ".join(uses), f"{block}: nothing runs it"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.snippets], ids=lambda page: page.path
)
def test_snippets_run(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page.launcher:
        launch(page, tmp_path)
    else:
        monkeypatch.chdir(tmp_path)
        run_distributed(run_snippets, page.ranks, page.snippets, timeout=LIMIT_S)


def run_snippets(P_world: Partition, blocks: list[Block]) -> None:
    """Run the blocks on a rank that is a thread: its world exists already."""
    names: dict[str, Any] = {"P_world": P_world, "__name__": "__docs__"}
    for block in blocks:
        with redirect_stdout(StringIO()) if block.printed else nullcontext() as printed:
            exec(block.code("P_world"), names)
        assert not printed or printed.getvalue() == block.printed, f"{block} prints something else"


def launch(page: Page, folder: Path) -> None:
    program = folder / "page.py"
    program.write_text("\n".join(block.text for block in page.snippets), encoding="utf-8")
    command = [warm.python(), "-m", "torch.distributed.run", "--standalone"]
    ended = subprocess.run(
        [*command, "--nproc-per-node", str(page.ranks), str(program)],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=LIMIT_S,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
