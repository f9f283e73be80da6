"""Workflows call targets of the Makefile, and the forms of the repository are well-formed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

yaml: Any = pytest.importorskip("yaml", reason="PyYAML is not installed: make docs")

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted(ROOT.glob(".github/workflows/*.yml"))
FORMS = sorted(ROOT.glob(".github/ISSUE_TEMPLATE/*.yml"))
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def jobs_of(workflow: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"].values())


def commands_of(job: dict[str, Any]) -> Iterator[str]:
    """Yield the commands, with each value of the matrix in its place."""
    matrix = job.get("strategy", {}).get("matrix", {})
    for step in job["steps"]:
        names = re.findall(r"\$\{\{ matrix\.(\w+) \}\}", step.get("run", ""))
        for value in matrix[names[0]] if names else [""]:
            yield re.sub(r"\$\{\{ matrix\.\w+ \}\}", value, step.get("run", ""))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_targets_of_the_makefile(path: Path) -> None:
    found: list[str] = []
    for job in jobs_of(path):
        assert job["timeout-minutes"] and job["steps"][0]["uses"].startswith("actions/checkout@")
        for command in filter(None, commands_of(job)):
            words = re.sub(r"\$\{\{.*?\}\}", "1", command).split()
            assert words[0] == "make" and words[1] in TARGETS, command
            variables = [word.partition("=")[0] for word in words[2:]]
            text = (ROOT / "Makefile").read_text()
            assert all(re.search(rf"^{name} \?=", text, re.MULTILINE) for name in variables)
            found.append(words[1])
    assert found
    text = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert text["permissions"] == {"contents": "read"}


def test_the_workflows_check_and_build() -> None:
    called = [c for path in WORKFLOWS for job in jobs_of(path) for c in commands_of(job)]
    assert {"make check", "make docs", "make wheels", "make wheels-test"} <= set(called)


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_has_what_the_code_host_requires(path: Path) -> None:
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    if path.stem == "config":
        assert all({"name", "url", "about"} == link.keys() for link in form["contact_links"])
        return
    assert form["name"] and form["description"]
    ids = [part["id"] for part in form["body"]]
    assert len(ids) == len(set(ids))
    assert all(part["attributes"]["label"] for part in form["body"])


def test_the_citation_names_the_paper() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    (paper,) = citation["references"]
    assert [author["family-names"] for author in paper["authors"]] == ["Hewett", "Grady"]
    assert paper["identifiers"][0]["value"].removeprefix("arXiv:") in paper["url"]
    urls = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'Source = "{citation["repository-code"]}"' in urls


@pytest.mark.parametrize(
    "name", ["SECURITY.md", "CODE_OF_CONDUCT.md", ".github/PULL_REQUEST_TEMPLATE.md"]
)
def test_links_lead_to_files(name: str) -> None:
    page = ROOT / name
    for link in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / link).is_file(), link
