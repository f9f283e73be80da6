"""``gpudist env``, as users run it."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from gpudist.cli import env, main
from gpudist.transport.host.core_transport import is_built
from gpudist.transport.nccl.library import wheel_libraries
from gpudist.world.environment import Cuda, Device, Environment, Nccl, TransportState
from gpudist.world.links import GpuLink
from tests import warm

ROOT = Path(__file__).resolve().parents[2]
DOUBLES = ("GPUDIST_NCCL_LIBRARY", "GPUDIST_DEVICE_LIBRARY")
FOUND = Environment(
    gpudist="0.1.0",
    python="3.11.7",
    torch="2.13.0+cu130",
    torch_cuda="13.0",
    tested_torch=("2.11", "2.15"),
    torch_is_tested=True,
    native_core=True,
    native_core_missing="",
    cuda=Cuda("13.0", "driver 580 or later", "13.1", 2, ""),
    devices=(Device("H200", 141 * 2**30), Device("H200", 141 * 2**30)),
    nccl=Nccl(
        "2.30.7",
        "/site/libnccl.so.2",
        "nvidia-nccl wheel",
        ("windows", "others"),
    ),
    nccl_missing="",
    transport="host",
    transport_reason="2 processes on one node",
    transports=(
        TransportState("nccl", True, "between GPUs"),
        TransportState("host", False, "no compiler"),
    ),
    links=(GpuLink(0, 1, "NV18", "18 NVLinks"),),
    warnings=("two wheels",),
)
TEXT = """\
gpudist      0.1.0
Python       3.11.7
torch        2.13.0+cu130, built for CUDA 13.0, within the tested 2.11 to 2.15
native core  built
CUDA half    built with CUDA 13.0, driver for CUDA up to 13.1, GPUs: 2
  needs      driver 580 or later, for kernels of CUDA 13.0
GPUs         H200, 141.0 GiB; H200, 141.0 GiB
NCCL         2.30.7, /site/libnccl.so.2 (nvidia-nccl wheel); windows, others
link         GPU 0 to GPU 1: NV18 (18 NVLinks)
transport    host: 2 processes on one node
  nccl       works, between GPUs
  host       does not work: no compiler
warning: two wheels
"""
NOTHING = Environment(
    gpudist="0.1.0",
    python="3.11.7",
    torch="2.13.0+cpu",
    torch_cuda=None,
    tested_torch=("2.14", "2.15"),
    torch_is_tested=False,
    native_core=False,
    native_core_missing="no compiler",
    cuda=None,
    devices=(),
    nccl=None,
    nccl_missing="there is no NCCL",
    transport="none",
    transport_reason="RANK is 8",
    transports=(),
    links=(),
    warnings=(),
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_env(kind: type[io.StringIO], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "describe", lambda: FOUND)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setattr(sys, "stdout", shown := kind())
    assert main(["env"]) == 0
    assert shown.getvalue() == TEXT


def test_env_where_there_is_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(env, "describe", lambda: NOTHING)
    assert main(["env"]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == [
        "torch        2.13.0+cpu, without CUDA, outside the tested 2.14 to 2.15",
        "native core  no compiler",
        "CUDA half    not built",
        "GPUs         none that torch sees",
        "NCCL         none: there is no NCCL",
        "transport    none: RANK is 8",
    ]


def test_env_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(env, "describe", lambda: FOUND)
    assert main(["env", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["nccl"] == {
        "version": "2.30.7",
        "path": "/site/libnccl.so.2",
        "found": "nvidia-nccl wheel",
        "features": ["windows", "others"],
    }
    assert printed["devices"][1] == {"name": "H200", "memory_bytes": 141 * 2**30}
    assert printed["warnings"] == ["two wheels"]


@pytest.mark.parametrize("with_rich", [True, False])
def test_lines_fit_a_terminal(monkeypatch: pytest.MonkeyPatch, with_rich: bool) -> None:
    """Lines fit, except for words that are longer, which are copied whole."""
    path = "/" + 60 * "p" + "/libnccl.so.2"
    missing = f"there is no NCCL ({path}: no such file): " + "install it or name its file, " * 4
    monkeypatch.setattr(env, "describe", lambda: replace(NOTHING, nccl_missing=missing))
    monkeypatch.setenv("COLUMNS", "50")
    if with_rich:
        pytest.importorskip("rich")
    else:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setattr(sys, "stdout", shown := Terminal())
    assert main(["env"]) == 0
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown.getvalue()).splitlines()
    assert [line for line in lines if len(line) > 50] == [line for line in lines if path in line]
    start = next(i for i, line in enumerate(lines) if line.startswith("NCCL"))
    assert all(line.startswith(" " * 13 + line[13]) for line in lines[start + 1 : -1])
    told = " ".join(line[13:] for line in lines[start:-1])
    assert told == f"none: {missing}".rstrip()


def test_on_a_terminal_with_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(env, "describe", lambda: FOUND)
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    main(["env"])
    assert "\x1b[1;36mNCCL       \x1b[0m  2.30.7, /site/libnccl.so.2" in terminal.getvalue()


def run(
    *arguments: str, python: str = sys.executable, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the command in an environment without the doubles of other tests."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [python, *arguments],
        env={
            **{name: os.environ[name] for name in os.environ if name not in DOUBLES},
            "PYTHONPATH": path,
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=90,
    )


def test_a_process() -> None:
    ended = run("-m", "gpudist", "env", "--json", python=warm.python())
    assert ended.returncode == 0, ended.stderr
    printed = json.loads(ended.stdout)
    assert printed["native_core"] is is_built()
    assert printed["transport"] == "loopback"
    assert (printed["nccl"] is None) is bool(printed["nccl_missing"])


def test_a_process_without_a_native_core() -> None:
    program = (
        "import sys; sys.modules['gpudist._native'] = None; "
        "from gpudist.cli import main; sys.exit(main(['env']))"
    )
    ended = run("-c", program)
    assert ended.returncode == 0, ended.stderr
    assert "native core  this installation of gpudist has no native core" in ended.stdout
    assert "NCCL         none: only the native core can open it" in ended.stdout


def wheel() -> str:
    """Return the real library, in a wheel that is installed."""
    paths = wheel_libraries()
    if not paths or not is_built():
        pytest.skip("there is no nvidia-nccl wheel, or no native core")
    return str(paths[0])


def test_the_wheel() -> None:
    path = wheel()
    ended = run("-m", "gpudist", "env", "--json")
    nccl = json.loads(ended.stdout)["nccl"]
    assert Path(nccl["path"]).samefile(path)
    assert nccl["found"] in ("nvidia-nccl wheel", "already in the process")


@pytest.mark.parametrize(
    "order", ["torch cupy gpudist", "torch gpudist cupy", "cupy gpudist torch", "gpudist cupy"]
)
def test_one_nccl_in_a_process_with_cupy(order: str) -> None:
    wheel()
    if "cupy" in order and find_spec("cupy") is None:
        pytest.skip("there is no CuPy")
    program = f"""
for name in {order.split()!r}:
    if name == "cupy":
        from cupy.cuda import nccl
        nccl.get_version()
    elif name == "gpudist":
        from gpudist.world.environment import describe
        assert describe().nccl is not None, describe().nccl_missing
    else:
        import torch
with open("/proc/self/maps") as maps:
    print(*{{line.split()[-1] for line in maps if "libnccl.so" in line}})
"""
    ended = run("-c", program)
    assert ended.returncode == 0, ended.stderr
    assert len(ended.stdout.split()) == 1, ended.stdout
