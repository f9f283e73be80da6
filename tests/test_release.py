"""Version, changelog, links and requirements of a release agree."""

from __future__ import annotations

import re
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import gpudist
from release import wheels

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def urls() -> dict[str, str]:
    table = text("pyproject.toml").split("[project.urls]\n")[1].split("\n\n")[0]
    return dict(re.findall(r'^(\w+) = "(.+)"$', table, re.MULTILINE))


@pytest.fixture(scope="module")
def arguments() -> Mapping[str, Any]:
    """Arguments of ``setup()``."""
    pytest.importorskip("setuptools")
    with patch("setuptools.setup") as setup:
        runpy.run_path(str(ROOT / "setup.py"))
    return setup.call_args.kwargs


def test_one_version() -> None:
    assert wheels.released_version() == gpudist.__version__
    assert not re.search(r"(?m)^version = \"", text("pyproject.toml"))


def test_every_version_of_the_changelog_has_a_link(urls: dict[str, str]) -> None:
    changelog = text("CHANGELOG.md")
    versions = re.findall(r"(?m)^## \[(.+?)\]", changelog)
    links = dict(re.findall(r"(?m)^\[(.+)\]: (\S+)$", changelog))
    assert versions[0] == "Unreleased" and versions == list(links)
    assert all(link.startswith(f"{urls['Source']}/") for link in links.values())


def test_urls_are_of_one_place(urls: dict[str, str]) -> None:
    assert {"Homepage", "Documentation", "Source", "Changelog", "Issues"} <= set(urls)
    for url in urls.values():
        assert url.startswith(urls["Source"])
        _, is_file, path = url.partition("/blob/main/")
        assert not is_file or (ROOT / path).is_file()


def test_links_of_the_package_page_are_absolute(
    arguments: Mapping[str, Any], urls: dict[str, str]
) -> None:
    shown = LINK.findall(arguments["long_description"])
    here = LINK.findall(text("README.md"))
    assert len(shown) == len(here) > 10
    assert any("/raw/" in link for link in shown)
    for link, original in zip(shown, here, strict=True):
        path = original.partition("#")[0]
        assert (ROOT / path).is_file()
        kind = "raw" if path.endswith(".svg") else "blob"
        assert link == f"{urls['Source']}/{kind}/v{gpudist.__version__}/{original}"


def test_a_version_without_a_changelog_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "gpudist").mkdir()
    (tmp_path / "gpudist/version.py").write_text('__version__ = "9.9.9"\n')
    (tmp_path / "CHANGELOG.md").write_text("## [0.1.0] - 2026-11-24\n")
    monkeypatch.setattr(wheels, "ROOT", tmp_path)
    with pytest.raises(wheels.ReleaseError, match=r"has no '## \[9\.9\.9\] - DATE'"):
        wheels.released_version()


def test_the_pages_name_the_driver_of_the_wheels() -> None:
    (nvcc,) = re.findall(r"nvidia-cuda-nvcc==(\d+\.\d+)", text("release/requirements.txt"))
    for page in ("README.md", "docs/install.md", "docs/install_gpu.md"):
        assert f"built with CUDA {nvcc}" in " ".join(text(page).split()), page
