"""The README's program runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"


def test_the_program_of_the_readme_trains(tmp_path: Path) -> None:
    program = re.search(r"```python\n(# train\.py.*?)```", README.read_text(), re.DOTALL)
    assert program is not None
    path = tmp_path / "train.py"
    path.write_text(program.group(1) + "print(f'loss {loss.item():.9f}', flush=True)\n")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "4",
    ]
    ended = subprocess.run(
        [*command, str(path)], capture_output=True, text=True, timeout=60, cwd=README.parent
    )
    assert ended.returncode == 0, ended.stderr
    # Four ranks write at once, so lines may run into each other.
    losses = re.findall(r"loss (\d\.\d{9})", ended.stdout)
    assert len(losses) == 4 and len(set(losses)) == 1
    assert 0 < float(losses[0]) < 3
