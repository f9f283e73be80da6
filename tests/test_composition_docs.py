"""The programs of docs/composition.md run as they stand there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "composition.md").read_text()


@pytest.mark.parametrize(("name", "losses"), [("data_parallel", 2), ("mixed_precision", 1)])
def test_program_trains(tmp_path: Path, name: str, losses: int) -> None:
    """All workers of a row have the same loss, and here all rows do."""
    program = re.search(rf"```python\n(# {name}\.py.*?)```", PAGE, re.DOTALL)
    assert program is not None
    path = tmp_path / f"{name}.py"
    path.write_text(program.group(1))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    ended = subprocess.run(
        [*command, "4", str(path)], capture_output=True, text=True, timeout=100, cwd=ROOT
    )
    assert ended.returncode == 0, ended.stderr
    # Four ranks write at once, so lines may run into each other.
    found = re.findall(r"loss (\d\.\d{6})", ended.stdout)
    assert len(found) == 4 * losses and len(set(found)) == 1
