"""Parsing the table of ``nvidia-smi topo -m``."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from gpudist.world import links
from gpudist.world.links import GpuLink, gpu_links, parse_topology

TABLE = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-47\t0\t\tN/A
GPU1\tNV18\t X \tPHB\tSYS\t0-47\t0\t\tN/A
GPU2\tSYS\tPHB\t X \tSYS\t48-95\t1\t\tN/A
NIC0\tPIX\tSYS\tSYS\t X

Legend:

  X    = Self
"""


def test_each_pair_once() -> None:
    assert parse_topology(TABLE) == (
        GpuLink(0, 1, "NV18", "18 NVLinks"),
        GpuLink(0, 2, "SYS", "between sockets"),
        GpuLink(1, 2, "PHB", "the PCIe of one socket"),
    )


def test_one_gpu() -> None:
    assert parse_topology("\tGPU0\tCPU Affinity\nGPU0\t X \t0-15\n") == ()


def test_without_the_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*arguments: Any, **options: Any) -> None:
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(links.subprocess, "run", missing)
    assert gpu_links() == ()


def test_with_the_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert command == ["nvidia-smi", "topo", "-m"]
        return subprocess.CompletedProcess(command, 0, TABLE, "")

    monkeypatch.setattr(links.subprocess, "run", found)
    assert len(gpu_links()) == 3
