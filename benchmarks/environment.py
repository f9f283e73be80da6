"""The environment in which rows were measured."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def environment(command: str, iterations: int) -> dict[str, Any]:
    """Describe the machine and the commit as JSON; versions follow once the ranks report them."""
    return {
        "cpu": cpu(),
        "cores": os.cpu_count(),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {},
        "commit": commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "load_before": round(os.getloadavg()[0], 2),
        "command": command,
        "iterations": iterations,
    }


def cpu() -> str:
    """Return the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def commit() -> str | None:
    """Return the checkout's commit, ``-dirty`` if files differ from it; ``None`` without git."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        ended = subprocess.run(
            [*command, "--exclude", "*"], capture_output=True, text=True, check=False, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ended.stdout.strip() or None if ended.returncode == 0 else None


def words(environment: Mapping[str, Any]) -> str:
    """Return an environment on one line, without entries that were not recorded."""
    versions = environment.get("versions") or {}
    parts = {
        "": environment.get("cpu"),
        "cores": environment.get("cores"),
        "kernel": environment.get("kernel"),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "commit": environment.get("commit"),
        "date": environment.get("date"),
        "load before": environment.get("load_before"),
    }
    said = [f"{name} {value}".strip() for name, value in parts.items() if value not in (None, "")]
    if environment.get("command"):
        said.append(f"`{environment['command']}`")
    return "; ".join(said) or "not recorded"
