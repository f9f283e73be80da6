"""Which NCCL is opened: tiny libraries in NCCL's place, each test in its own process."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from gpudist.transport.host.core_transport import is_built

pytestmark = pytest.mark.skipif(not is_built(), reason="needs the native core")

ROOT = Path(__file__).resolve().parents[2]
CALLS = re.findall(r'"(nccl[A-Z]\w+)"\);', (ROOT / "csrc/nccl/nccl_api.cpp").read_text())

# Without torch, which takes a second to import and may bring an NCCL along.
BEGIN = f"""
import ctypes, json, sys, types
package = types.ModuleType("gpudist")
package.__path__ = [{str(ROOT / "gpudist")!r}]
sys.modules["gpudist"] = package
from gpudist._native import nccl_information
from gpudist.errors import NotBuiltError

def report(path="", wheel_paths=()):
    try:
        information = nccl_information(path, wheel_paths)
    except NotBuiltError as error:
        information = {{"error": str(error)}}
    with open("/proc/self/maps") as maps:
        files = {{line.split()[-1] for line in maps if "nccl" in line.rpartition("/")[2]}}
    print(json.dumps({{**information, "mapped": sorted(files)}}))
"""

Library = Callable[..., str]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """Make a library of a version, without some of NCCL's calls and with others."""
    compiler = shutil.which("cc") or shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C compiler")
    assert len(CALLS) >= 20

    def make(
        version: int = 22705,
        name: str = "libnccl.so.2",
        without: Sequence[str] = (),
        more: Sequence[str] = (),
    ) -> str:
        folder = tmp_path_factory.mktemp("nccl")
        calls = {*CALLS, *more} - {"ncclGetVersion", *without}
        source = folder / "nccl.c"
        source.write_text(
            "\n".join(f"int {call}() {{ return 0; }}" for call in sorted(calls))
            + f"\nint ncclGetVersion(int* version) {{ *version = {version}; return 0; }}\n"
        )
        command = [compiler, "-shared", "-fPIC", f"-Wl,-soname,{name}"]
        subprocess.run([*command, "-o", str(folder / name), str(source)], check=True, timeout=60)
        return str(folder / name)

    return make


def run(script: str, search: str = "") -> list[dict[str, object]]:
    """Return what each ``report()`` of a process found, with one more library folder."""
    ended = subprocess.run(
        [sys.executable, "-c", BEGIN + script],
        env={**os.environ, "LD_LIBRARY_PATH": search},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


def test_the_given_one_comes_first(library: Library) -> None:
    given, wheel, system = library(), library(), library()
    (found,) = run(f"report({given!r}, [{wheel!r}])", str(Path(system).parent))
    assert found == {
        "path": given,
        "found": "GPUDIST_NCCL_LIBRARY",
        "version": 22705,
        "has_windows": True,
        "has_shared_gpus": False,
        "mapped": [given],
    }


def test_the_one_in_the_process_comes_before_the_wheels(library: Library) -> None:
    loaded, wheel = library(), library()
    (found,) = run(f"ctypes.CDLL({loaded!r}); report('', [{wheel!r}])")
    assert (found["path"], found["found"]) == (loaded, "already in the process")
    assert found["mapped"] == [loaded]


def test_one_in_the_process_under_another_name(library: Library) -> None:
    plugin = library(name="libnccl-net.so", without=["ncclGetUniqueId"])
    loaded, wheel = library(name="libnccl-1a2b3c4d.so.2.27.5"), library()
    (found,) = run(f"ctypes.CDLL({plugin!r}); ctypes.CDLL({loaded!r}); report('', [{wheel!r}])")
    assert (found["path"], found["found"]) == (loaded, "already in the process")


def test_a_plugin_of_nccl_is_none(library: Library) -> None:
    plugin = library(name="libnccl-net.so", without=["ncclGetUniqueId"])
    wheel = library()
    (found,) = run(f"ctypes.CDLL({plugin!r}); report('', [{wheel!r}])")
    assert (found["path"], found["found"]) == (wheel, "nvidia-nccl wheel")


def test_the_wheel_comes_before_the_system(library: Library) -> None:
    wheel, system = library(23000), library()
    (found,) = run(f"report('', ['/nowhere/libnccl.so.2', {wheel!r}])", str(Path(system).parent))
    assert (found["path"], found["found"]) == (wheel, "nvidia-nccl wheel")
    assert found["has_windows"] and found["has_shared_gpus"]
    assert found["mapped"] == [wheel]


def test_the_system(library: Library) -> None:
    system = library(22200)
    (found,) = run("report('', ['/nowhere/libnccl.so.2'])", str(Path(system).parent))
    assert (found["path"], found["found"], found["version"]) == (system, "system", 22200)
    assert not found["has_windows"]


def test_the_given_one_may_be_in_the_process(library: Library, tmp_path: Path) -> None:
    loaded = library()
    link = tmp_path / "libnccl.so"
    link.symlink_to(loaded)
    (found,) = run(f"ctypes.CDLL({loaded!r}); report({str(link)!r})")
    assert (found["found"], found["mapped"]) == ("GPUDIST_NCCL_LIBRARY", [loaded])


def test_two_are_refused(library: Library) -> None:
    loaded, given = library(), library()
    (found,) = run(f"ctypes.CDLL({loaded!r}); report({given!r})")
    assert given in str(found["error"]) and loaded in str(found["error"])
    assert "one process cannot use two" in str(found["error"])
    assert found["mapped"] == [loaded]


def test_a_double_may_stand_beside_one(library: Library) -> None:
    loaded, double = library(), library(more=["gpudist_device_api"])
    (found,) = run(f"ctypes.CDLL({loaded!r}); report({double!r})")
    assert (found["path"], found["found"]) == (double, "GPUDIST_NCCL_LIBRARY")


@pytest.mark.parametrize(("version", "text"), [(22105, "2.21.5"), (2804, "2.8.4")])
def test_one_that_is_too_old(library: Library, version: int, text: str) -> None:
    old = library(version)
    (found,) = run(f"report('', [{old!r}])")
    assert found["error"] == (
        f"the NCCL at {old} (nvidia-nccl wheel) is version {text}, "
        f"but NCCL 2.22.0 or later is needed"
    )


@pytest.mark.parametrize("call", ["ncclCommSplit", "ncclReduceScatter"])
def test_one_that_lacks_a_call(library: Library, call: str) -> None:
    lacking = library(without=[call])
    (found,) = run(f"report({lacking!r})")
    assert f"the NCCL at {lacking} (GPUDIST_NCCL_LIBRARY) has no {call}" in str(found["error"])


def test_another_library() -> None:
    (found,) = run("report('libm.so.6')")
    assert "NCCL at libm.so.6 (GPUDIST_NCCL_LIBRARY) has no ncclGetVersion" in str(found["error"])


def test_one_that_cannot_be_opened(library: Library) -> None:
    wheel = library()
    (found,) = run(f"report('/nowhere/libnccl.so.2', [{wheel!r}])")
    assert "GPUDIST_NCCL_LIBRARY cannot be opened: /nowhere/libnccl.so.2" in str(found["error"])
    assert found["mapped"] == []


def test_a_wheel_that_cannot_be_opened(library: Library, tmp_path: Path) -> None:
    broken = tmp_path / "libnccl.so.2"
    broken.write_bytes(b"half a download")
    (found,) = run(f"report('', [{str(broken)!r}])", str(Path(library()).parent))
    assert f"NCCL cannot be opened: {broken}" in str(found["error"])


def test_none_at_all() -> None:
    (found,) = run("report()")
    if "error" not in found:
        pytest.skip(f"the system has an NCCL: {found['path']}")
    assert "there is no NCCL" in str(found["error"])
    assert "install nvidia-nccl-cu12 or nvidia-nccl-cu13" in str(found["error"])


def test_the_first_call_decides(library: Library) -> None:
    first, second = library(), library()
    one, other = run(f"report('', [{first!r}]); report({second!r})")
    assert one == other and one["mapped"] == [first]


def test_a_call_that_failed_decides_nothing(library: Library) -> None:
    wheel = library()
    _, found = run(f"report('/nowhere/libnccl.so.2'); report('', [{wheel!r}])")
    assert (found["path"], found["found"]) == (wheel, "nvidia-nccl wheel")
