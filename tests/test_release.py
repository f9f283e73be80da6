"""Version, changelog, links and requirements of a release agree."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch
from zipfile import ZipFile

import pytest

import gpudist
from release import stable_abi, wheel_test, wheels
from release.interpreters import NoPython

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
    assert versions[0] in ("Unreleased", gpudist.__version__) and versions == list(links)
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
    here = [link for link in LINK.findall(text("README.md")) if "://" not in link]
    shown = LINK.findall(arguments["long_description"])
    shown = [link for link in shown if link.startswith(urls["Source"])]
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
    (nvrtc,) = re.findall(r"nvidia-cuda-nvrtc-cu12==(\d+\.\d+)", text("release/requirements.txt"))
    for page in ("README.md", "docs/install.md", "docs/install_gpu.md"):
        assert f"built with CUDA {nvrtc}" in " ".join(text(page).split()), page


def test_a_wheel_without_code_for_a_generation_is_refused(tmp_path: Path) -> None:
    def cubin(*flags: int) -> bytes:
        return b"\x7fELF\x02\x01" + bytes(12) + b"\xbe\0" + bytes(28) + bytes(flags)

    def wheel_of(*images: bytes) -> Path:
        path = tmp_path / "some.whl"
        units = text("cmake/cuda.cmake").count("\ngpudist_unit(")
        with ZipFile(path, "w") as archive:
            archive.writestr("gpudist/_native.abi3.so", b"".join(images) * units)
        return path

    ptx = b"\n.version 8.8\n.target sm_80\n"
    cubins = [cubin(0x50, 5), cubin(0x5A, 5), cubin(2, 100), cubin(2, 120)]
    assert wheels.gpu_code(wheel_of(ptx, *cubins)) == wheels.GPU_CODE
    with pytest.raises(wheels.ReleaseError, match=r"has .*'sm_80': 4.*, but must have each of"):
        wheels.gpu_code(wheel_of(ptx, *cubins[:2]))


def test_every_version_of_python_is_built_and_imported() -> None:
    named = re.findall(r"Programming Language :: Python :: (3\.\d+)", text("pyproject.toml"))
    assert list(wheel_test.PYTHONS) == named
    assert f'requires-python = ">={named[0]}"' in text("pyproject.toml")
    (default,) = re.findall(r"(?m)^PYTHONS \?= (.+)$", text("Makefile"))
    assert default.split() == list(wheels.PYTHONS)
    # The last wheel serves later versions; it is checked by `make stable-abi`.
    assert [p for p in named if p <= wheels.PYTHONS[-1]] == list(wheels.PYTHONS)
    assert wheels.PYTHONS[-1] == stable_abi.PYTHON
    assert "$(MAKE) -j2 types stable-abi" in text("Makefile")


def test_all_bindings_are_compiled_for_the_stable_abi() -> None:
    assert set(stable_abi.bindings()) == set((ROOT / "csrc").glob("bindings*.cpp"))


def test_a_macro_outside_the_stable_abi_is_found(tmp_path: Path) -> None:
    pytest.importorskip("nanobind", reason="nanobind is not installed: make .venv/.analysis")
    try:
        headers = stable_abi.headers_of(stable_abi.PYTHON)
    except NoPython as missing:
        pytest.skip(str(missing))
    source = tmp_path / "source.cpp"
    for call, is_right in {"PyList_SetItem": True, "PyList_SET_ITEM": False}.items():
        source.write_text(
            "#include <nanobind/nanobind.h>\n"
            f"void set(PyObject* list, PyObject* item) {{ {call}(list, 0, item); }}\n"
        )
        error = stable_abi.error_of(source, headers)
        assert not error if is_right else f"{call}\u2019 was not declared" in error, error


@pytest.mark.parametrize(("ci", "status"), [("true", 1), ("", 0)])
def test_missing_headers_fail_where_nobody_looks(
    ci: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CI", ci)
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("PYENV_ROOT", "/nonexistent")
    monkeypatch.setattr(sys, "argv", ["make stable-abi"])
    assert stable_abi.main() == status
    said = capsys.readouterr().out
    assert said.startswith("not checked against the stable ABI: bindings.cpp, ")
    assert "there is no python3.12" in said


def test_the_native_core_loads_without_torch() -> None:
    ended = subprocess.run(
        [sys.executable, ROOT / "release/load_native.py"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert ended.returncode == 0 and "processes exchanged" in ended.stdout, ended.stderr


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Sources of a wheel with an empty package, and a ``cmake`` and a compiler that fail."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    package = tmp_path / "gpudist"
    package.mkdir()
    (package / "__init__.py").touch()
    shutil.copy(ROOT / "gpudist/version.py", package)
    (tmp_path / "tools").mkdir()
    for tool in ("cmake", "c++"):
        program = tmp_path / "tools" / tool
        program.write_text("#!/bin/sh\necho an error of $0 >&2\nexit 1\n")
        program.chmod(0o755)
    return tmp_path


def build_wheel(tree: Path, **variables: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Build a wheel with the tools of ``tree`` alone; return what is said and the wheels' names."""
    pytest.importorskip("nanobind", reason="nanobind is not installed: make .venv/.analysis")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("GPUDIST_", "CXX"))}
    built = subprocess.run(
        [sys.executable, "setup.py", "-q", "bdist_wheel"],
        cwd=tree, env=kept | {"PATH": str(tree / "tools")} | variables,
        capture_output=True, text=True, check=False, timeout=120, start_new_session=True,
    )  # fmt: skip
    return built, [wheel.name for wheel in tree.glob("dist/*.whl")]


@pytest.mark.parametrize("missing", ["cmake", "c++"])
def test_a_wheel_without_a_compiler_or_cmake_is_for_any_machine(tree: Path, missing: str) -> None:
    (tree / "tools" / missing).unlink()
    built, names = build_wheel(tree)
    assert names == [f"gpudist-{gpudist.__version__}-py3-none-any.whl"], built.stderr
    assert "WITHOUT ITS NATIVE CORE: there is no " in built.stderr
    built, _ = build_wheel(tree, GPUDIST_NATIVE="on")
    assert built.returncode != 0 and "cannot be built: there is no " in built.stderr


def test_a_wheel_that_leaves_the_core_out_is_for_any_machine(tree: Path) -> None:
    built, names = build_wheel(tree, GPUDIST_NATIVE="off")
    assert names == [f"gpudist-{gpudist.__version__}-py3-none-any.whl"], built.stderr
    assert "WITHOUT ITS NATIVE CORE" not in built.stderr


def test_an_error_of_the_compiler_fails_the_install(tree: Path) -> None:
    for variables in ({}, {"CXX": "no-such-compiler"}):
        built, names = build_wheel(tree, **variables)
        assert built.returncode != 0 and names == []
        assert "building the native core failed: cmake -S" in built.stderr
        assert "GPUDIST_NATIVE=off installs gpudist without" in built.stderr


def test_a_misspelled_choice_is_refused(tree: Path) -> None:
    built, names = build_wheel(tree, GPUDIST_NATIVE="no")
    assert built.returncode != 0 and names == []
    assert "GPUDIST_NATIVE is 'no', but must be auto, on or off" in built.stderr
