"""The site builds without a warning, loads nothing from elsewhere, and has all public names."""

from __future__ import annotations

import importlib
import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
import zlib
from contextlib import suppress
from functools import reduce
from html import unescape
from importlib.util import find_spec
from inspect import ismodule
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.docs.pages import ROOT, read

ROOMS = (
    *("gpudist", "gpudist.nn", "gpudist.nn.utils", "gpudist.ops", "gpudist.sbp", "gpudist.data"),
    *("gpudist.batch", "gpudist.convert", "gpudist.checkpoint", "gpudist.planning"),
    *("gpudist.testing", "gpudist.errors", "gpudist.amp"),
)
NO_NETWORK = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
# A page's scripts, styles, fonts and images; links to other sites are no part of it.
LOADED = re.compile(r"<(?:script|img|iframe|source)[^>]*\ssrc=\"?([^\s\">]+)|<link([^>]+)>")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site without a network."""
    if find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed: make docs")
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1", **NO_NETWORK},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    return folder


def test_the_site_is_whole(site: Path) -> None:
    pages = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    assert {"index.html", "tutorial.html", "reference/ops.html", "howto/distdl.html"} <= pages
    for page in pages:
        text = (site / page).read_text(encoding="utf-8")
        for source, link in LOADED.findall(text):
            loaded = source or ("stylesheet" in link and link)
            assert not loaded or "//" not in loaded, f"{page} loads {loaded}"
    inventory = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    modules = re.findall(rb"^(\S+) py:module ", zlib.decompress(inventory), re.MULTILINE)
    assert not modules, f"instead of their functions, the reference has the modules {modules}"
    assert (site / "llms.txt").is_file()


def test_everything_is_within_two_clicks(site: Path) -> None:
    pages = {path.relative_to(site).as_posix() for path in site.rglob("*.html")} - {"404.html"}
    reached, last = {"index.html"}, {"index.html"}
    for _ in range(2):
        last = {link for page in last for link in links_of(site, page)} - reached
        reached |= last
    far = {page for page in pages - reached if "repository/" not in page or "RESULTS" in page}
    assert not far


def links_of(site: Path, page: str) -> set[str]:
    """Return the pages of the site that ``page`` links to."""
    text = (site / page).read_text(encoding="utf-8")
    links = re.findall(r'href="?([^\s">#]+\.html)', text)
    here = posixpath.dirname(page)
    return {
        posixpath.normpath(posixpath.join(here, link)) for link in links if "//" not in link
    } & {path.relative_to(site).as_posix() for path in site.rglob("*.html")}


def test_copy_buttons_copy_commands_alone(site: Path) -> None:
    copied = re.findall(r'data-copy="([^"]*)"', (site / "tutorial.html").read_text("utf-8"))
    shown = [block.commands for block in read("docs/tutorial.md").blocks if block.commands]
    assert [unescape(text).splitlines() for text in copied] == [
        [command.rstrip("\n") for command, _ in commands] for commands in shown
    ]


def test_search_in_a_folder(site: Path) -> None:
    index = (site / "search" / "search_index.js").read_text("utf-8")
    assert len(json.loads(index.removeprefix("var __index = "))["docs"]) > 100
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("chromium is not installed")
    shown = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=30000",
         "--dump-dom", f"{(site / 'index.html').as_uri()}?q=halo"],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert re.search(r"\d+ matching documents", shown.stdout), shown.stderr[-2000:]


def test_the_index_for_language_models_links_to_pages() -> None:
    text = (ROOT / "docs" / "llms.txt").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) > 30
    missing = [link for link in links if not (ROOT / "docs" / link).with_suffix(".md").is_file()]
    assert not missing
    calls = re.findall(r"`(?:\w+ = )?gpudist\.([\w.]+)", text)
    assert all(resolve(f"gpudist.{name}") for name in calls)


def test_every_public_name_is_in_the_reference() -> None:
    hooks: Any = importlib.import_module("docs.hooks")
    files = (ROOT / "docs/reference").glob("*.md")
    pages = (
        hooks.with_operators(hooks.with_layers(file.read_text(encoding="utf-8"))) for file in files
    )
    names = [name for page in pages for name in re.findall(r"^::: (\S+)$", page, re.MULTILINE)]
    assert len(names) == len(set(names)), "a name is there twice"
    there = [resolve(name) for name in names]
    missing = [
        f"{room}.{name}"
        for room in ROOMS
        for name, found in public_parts(importlib.import_module(room))
        if not ismodule(found) and not any(found is one for one in there)
    ]
    assert not missing, f"on no page of docs/reference: {missing}"


def public_parts(module: ModuleType) -> list[tuple[str, Any]]:
    """``__all__``, else what the module defines itself."""
    own = (
        name for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
    )  # fmt: skip
    return [(name, getattr(module, name)) for name in getattr(module, "__all__", own)]


def resolve(path: str) -> Any:
    """Return the object at the dotted ``path``, importing as many modules as exist."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        with suppress(ModuleNotFoundError):
            module = importlib.import_module(".".join(parts[:length]))
            return reduce(getattr, parts[length:], module)
    raise AssertionError(f"{path} is nothing")
