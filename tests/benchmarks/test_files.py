"""Result files are JSON lines: written, read, joined, and refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import environment
from benchmarks.document import RESULTS
from benchmarks.files import BadFile, read, rows_of, write
from benchmarks.measure import rows_of as measured
from tests.benchmarks.test_rows import CASE, KEYS, series

ROWS = measured(CASE, [series("gpudist", 3), series("gloo", 4), series("clone", 2)])


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "results" / "halo-2.jsonl"
    write(ROWS, {"cores": 2}, path)
    first, *lines = map(json.loads, path.read_text().splitlines())
    assert first == {"environment": {"cores": 2}}
    assert [list(line) for line in lines] == [KEYS, KEYS]
    (run,) = read(path)
    assert (run.source, run.environment, run.rows) == ("halo-2", {"cores": 2}, ROWS)


def test_files_can_be_joined_and_folders_read(tmp_path: Path) -> None:
    for name, cores in (("a", 2), ("b", 4)):
        write(ROWS[:1], {"cores": cores}, tmp_path / f"{name}.jsonl")
    assert [run.environment["cores"] for run in read(tmp_path)] == [2, 4]
    texts = [path.read_text() for path in sorted(tmp_path.glob("*.jsonl"))]
    joined = tmp_path / "joined"
    joined.write_text("".join(texts))
    assert [run.environment["cores"] for run in read(joined)] == [2, 4]
    assert rows_of(joined) == [ROWS[0], ROWS[0]]


def test_the_folder_of_committed_results_can_be_read() -> None:
    """The page of all results, and ``--all``, read it whole."""
    assert rows_of(RESULTS)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the file is empty"),
        ("[]\n", ":1: not a JSON object"),
        ('{"environment": {}}\nnonsense\n', ":2: not JSON"),
        ('{"environment": {}}\n{"subject": "halo"}\n', ":2: neither an environment nor"),
    ],
)
def test_what_is_no_result_file_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(BadFile, match=words):
        read(path)


def test_a_missing_file_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="No such file"):
        read(tmp_path / "none.jsonl")
    with pytest.raises(BadFile, match=r"no \.jsonl file in this folder"):
        read(tmp_path)


def test_the_environment_names_machine_and_commit() -> None:
    found = environment.environment("make bench", 30)
    assert list(found) == [
        "cpu", "cores", "kernel", "python", "versions", "commit", "date", "load_before",
        "command", "iterations",
    ]  # fmt: skip
    assert found["commit"] is None or len(found["commit"].removesuffix("-dirty")) == 40
    said = environment.words({**found, "cores": 2, "commit": "abc", "cpu": None})
    assert said.startswith("cores 2; kernel Linux") and said.endswith("; `make bench`")
    assert "commit abc; date 20" in said
    assert environment.words({"cpu": None}) == "not recorded"
