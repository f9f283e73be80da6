"""The benchmarks' command: rows with results that were checked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpudist.transport.host import is_built, what_is_missing

ROOT = Path(__file__).resolve().parents[1]
KEYS = {
    *("subject", "case", "ranks", "bytes", "us_median", "us_p10", "us_p90"),
    *("peer", "peer_us_median", "ratio", "correct"),
}


@pytest.mark.skipif(not is_built(), reason="" if is_built() else what_is_missing())
def test_messages_are_measured_beside_gloo(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    command = [sys.executable, "-m", "benchmarks", "--subject", "messages", "--iterations", "2"]
    subprocess.run([*command, "--json", str(path)], cwd=ROOT, check=True, timeout=60)
    rows = json.loads(path.read_text())
    assert [row["case"] for row in rows] == ["4 KiB", "64 KiB", "1 MiB", "16 MiB"]
    for row in rows:
        assert set(row) == KEYS and row["correct"] and row["peer"] == "gloo"
        assert row["ratio"] == pytest.approx(row["us_median"] / row["peer_us_median"], abs=0.01)
