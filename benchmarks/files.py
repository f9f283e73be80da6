"""Result files in JSON lines: an environment, then the rows measured in it, one per line.

Files can be joined by ``cat``: an environment line applies to the rows after it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks.rows import Row

ENVIRONMENT = "environment"
_KEYS = tuple(field.name for field in fields(Row))


class BadFile(Exception):
    """The file is missing or is not a result file; the message says where."""


@dataclass(frozen=True)
class Run:
    """Rows, the environment they were measured in, and the name of their file."""

    source: str
    environment: dict[str, Any]
    rows: list[Row]


def write(rows: Sequence[Row], environment: Mapping[str, Any], path: Path) -> None:
    """Write the environment, then the rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [{ENVIRONMENT: dict(environment)}, *(asdict(row) for row in rows)]
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    path.write_text(text, encoding="utf-8")


def read(path: Path) -> list[Run]:
    """Read the runs of a file, or of all ``.jsonl`` files in a folder.

    Raises:
        BadFile: there are no such files, or a line is neither an environment nor a row.
    """
    if path.is_dir():
        found = sorted(path.glob("*.jsonl"))
        if not found:
            raise BadFile(f"{path}: no .jsonl file in this folder")
        return [run for file in found for run in read(file)]
    runs: list[Run] = []
    for place, line in lines_of(path):
        if ENVIRONMENT in line:
            runs.append(Run(path.stem, line[ENVIRONMENT], []))
        elif not runs or any(key not in line for key in _KEYS):
            raise BadFile(f"{place}: neither an environment nor, after one, a row")
        else:
            runs[-1].rows.append(Row(**{key: line[key] for key in _KEYS}))
    if not runs:
        raise BadFile(f"{path}: the file is empty")
    return runs


def rows_of(path: Path) -> list[Row]:
    """Return the rows of a file or folder, from all environments."""
    return [row for run in read(path) for row in run.rows]


def lines_of(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return the place and the content of each line."""
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadFile(f"{path}: {error}") from error
    found: list[tuple[str, dict[str, Any]]] = []
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
        except ValueError as error:
            raise BadFile(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(line, dict):
            raise BadFile(f"{path}:{number}: not a JSON object")
        found.append((f"{path}:{number}", line))
    return found
