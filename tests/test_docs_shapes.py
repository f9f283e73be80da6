"""The blocks of docs/shapes.md run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from gpudist.partition import Partition
from tests.pool import distributed

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "shapes.md"


@distributed(ranks=2, transports=["loopback", "host"])
def test_the_blocks_run(P_world: Partition) -> None:
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    program = "".join(blocks)
    assert len(blocks) == 5 and "P_world = gpudist.init()\n" in program
    names: dict[str, Any] = {"P_world": P_world}
    exec(program.replace("P_world = gpudist.init()\n", ""), names)
