"""Install what is in ``dist/`` as a user does, and check it: ``make wheels-test``.

Each wheel goes into a clean virtual environment of every Python that it is for. If the pinned
torch can be had for that Python without CUDA's libraries, ``gpudist check`` runs on threads and on
processes, and ``gpudist env`` must find the NCCL of both wheels. Otherwise the native core is
loaded without torch (``--cuda-torch`` installs torch's gigabytes instead). Then the source
distribution is installed without a compiler, which must be announced, and the announced remedy is
carried out where there is one. The log goes to ``build/wheels/test.log``.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from release.interpreters import NoPython, new_environment

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
PIP = ("-m", "pip", "install", "-qq", "--disable-pip-version-check")
LIMIT_S = 1800.0
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


class Log:
    """Prints lines and keeps them in a file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8")

    def say(self, text: str) -> None:
        for stream in (sys.stdout, self._file):
            print(text, file=stream, flush=True)


class Environment:
    """Virtual environment in a folder of its own, far from the checkout."""

    def __init__(self, log: Log, python: str, folder: Path, path: str | None = None) -> None:
        self.log = log
        self.folder = folder
        self.python = new_environment(python, folder / "venv")
        path = path or os.environ["PATH"]
        self.variables = {
            name: text
            for name, text in os.environ.items()
            if not name.startswith(("GPUDIST_", "PYTHON", "CUDA_", "LD_", "VIRTUAL_ENV"))
        } | {"PATH": os.pathsep.join([str(self.python.parent), path]), "OMP_NUM_THREADS": "1"}

    def run(self, *arguments: str | Path, on_terminal: bool = False) -> str:
        """Run Python with ``arguments``; print what it prints.

        Raises:
            SystemExit: the program fails.
        """
        shown = ["python", *(str(a).replace(str(ROOT), "") for a in arguments)]
        self.log.say(f"$ {' '.join(shown)}")
        command = [str(self.python), *map(str, arguments)]
        start = time.monotonic()
        run = _run_on_terminal if on_terminal else _run
        status, text = run(command, self.folder, self.variables)
        self.log.say(text.rstrip())
        self.log.say(f"# exit status {status}, {time.monotonic() - start:.1f} s\n")
        if status != 0:
            raise SystemExit(f"failed: {' '.join(shown)}")
        return text


def _run(command: Sequence[str], folder: Path, variables: dict[str, str]) -> tuple[int, str]:
    ended = subprocess.run(
        command, cwd=folder, env=variables, text=True, check=False, timeout=LIMIT_S,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return ended.returncode, ended.stdout


def _run_on_terminal(
    command: Sequence[str], folder: Path, variables: dict[str, str]
) -> tuple[int, str]:
    """Run a command on a terminal of its own, as its user sees it."""
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(folder)
        os.execve(command[0], list(command), variables)
    read: list[bytes] = []
    while True:
        try:
            some = os.read(terminal, 4096)
        except OSError:  # the terminal of a process that has ended
            break
        read.append(some)
    _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status), b"".join(read).decode().replace("\r\n", "\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="make wheels-test", description=__doc__)
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="folder of the wheels")
    parser.add_argument("--log", type=Path, default=ROOT / "build/wheels/test.log")
    parser.add_argument("--pythons", nargs="+", default=PYTHONS, help="versions of Python")
    parser.add_argument("--cuda-torch", action="store_true", help="install torch with CUDA too")
    arguments = parser.parse_args()
    log = Log(arguments.log)
    checked: list[str] = []
    loaded: list[str] = []
    for python in arguments.pythons:
        wheel = wheel_for(python, arguments.dist)
        with_torch = arguments.cuda_torch or has_light_torch(python)
        log.say(f"== Python {python}: {wheel.name}\n")
        with tempfile.TemporaryDirectory() as folder:
            try:
                environment = Environment(log, python, Path(folder))
            except NoPython as missing:
                log.say(f"skipped: {missing}\n")
                continue
            if with_torch:
                # A torch with CUDA brings the NCCL that it needs.
                with_nccl = not checked and has_light_torch(python)
                check_with_torch(environment, wheel, with_nccl)
                checked.append(python)
            else:
                log.say(
                    f"{pinned_torch()} for this Python comes with CUDA's libraries: the native "
                    f"core is loaded without torch, and gpudist check does not run.\n"
                )
                environment.run(*PIP, "--no-deps", wheel)
                program = shutil.copy(ROOT / "release/load_native.py", folder)
                said = environment.run(program)
                assert "CUDA half: not built" not in said, "no CUDA half"
                loaded.append(python)
    check_without_compiler(log, arguments.dist)
    log.say(
        f"== passed; gpudist check ran on Python {', '.join(checked) or 'none'}, "
        f"the native core alone on {', '.join(loaded) or 'none'}"
    )


def wheel_for(python: str, dist: Path) -> Path:
    """Return the wheel in ``dist`` for this version of Python."""
    minor = int(python.partition(".")[2])
    tag = f"cp3{minor}-cp3{minor}" if minor < 12 else "cp312-abi3"
    (wheel,) = dist.glob(f"gpudist-*-{tag}-*.whl")
    return wheel


def pinned_torch() -> str:
    (pin,) = re.findall(r"^torch==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return pin


def has_light_torch(python: str) -> bool:
    """Return whether pip would install the pinned torch without CUDA's libraries."""
    with tempfile.TemporaryDirectory() as folder:
        asked = subprocess.run(
            [
                sys.executable, *PIP, "--dry-run", "--report", "-", "--no-deps",
                "--ignore-installed", "--python-version", python, "--only-binary=:all:",
                "--target", folder, pinned_torch(),
            ],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    (found,) = json.loads(asked.stdout)["install"]
    return not any("cuda" in needed for needed in found["metadata"].get("requires_dist", []))


def check_with_torch(environment: Environment, wheel: Path, with_nccl: bool) -> None:
    environment.run(*PIP, pinned_torch())
    environment.run(*PIP, wheel)
    environment.run("-m", "gpudist", "--version")
    found = environment.run("-m", "gpudist", "env")
    assert re.search(r"^native core  built$", found, re.MULTILINE), "no native core"
    assert re.search(r"^CUDA half    built with CUDA 1\d\.\d", found, re.MULTILINE), "no CUDA half"
    assert "verdict: " in environment.run("-m", "gpudist", "check")
    assert "host" in environment.run(*TORCHRUN, "-m", "gpudist", "check")
    for package in NCCL if with_nccl else ():
        environment.run(*PIP, "--no-deps", package)
        found = environment.run("-m", "gpudist", "env")
        assert re.search(r"^NCCL         2\..+\(nvidia-nccl wheel\)", found, re.MULTILINE), package
        environment.run("-m", "pip", "uninstall", "--yes", "--quiet", package)


def check_without_compiler(log: Log, dist: Path) -> None:
    """Install the source distribution where there is no compiler; both places must say so."""
    (source,) = dist.glob("*.tar.gz")
    python = next((p for p in PYTHONS if has_light_torch(p)), "")
    log.say(f"== {source.name} without a compiler\n")
    if not python:
        log.say("skipped: torch cannot be had without CUDA's libraries\n")
        return
    with tempfile.TemporaryDirectory() as folder:
        tools = Path(folder) / "bin"  # a PATH without a compiler
        tools.mkdir()
        for name in ("sh", "uname"):
            (tools / name).symlink_to(shutil.which(name) or f"/bin/{name}")
        environment = Environment(log, python, Path(folder), str(tools))
        environment.run(*PIP, pinned_torch())
        said = environment.run(*PIP, "--no-cache-dir", source, on_terminal=True)
        assert "WITHOUT ITS NATIVE CORE" in said and "--no-deps" in said
        (tags,) = Path(folder).glob("venv/lib/*/site-packages/gpudist-*.dist-info/WHEEL")
        assert "\nTag: py3-none-any\n" in tags.read_text(), "tagged for a machine"
        said = environment.run(*TORCHRUN, "-m", "gpudist", "check")
        assert "using gloo, which is many times slower" in said and "--no-deps" in said
        environment.variables |= {
            "PATH": os.pathsep.join([str(environment.python.parent), os.environ["PATH"]]),
            "GPUDIST_NATIVE": "on",
            "GPUDIST_CUDA": "off",
        }
        (torch,) = Path(folder).glob("venv/lib/*/site-packages/torch-*.dist-info/RECORD")
        installed = torch.stat().st_mtime_ns
        log.say("with a compiler, GPUDIST_NATIVE=on and, for a short build, GPUDIST_CUDA=off:\n")
        remedy = ("--force-reinstall", "--no-deps", "--no-cache-dir", source)
        environment.run(*PIP, *remedy)
        assert torch.stat().st_mtime_ns == installed, "torch was installed again"
        found = environment.run("-m", "gpudist", "env")
        assert re.search(r"^native core  built$", found, re.MULTILINE), "no native core"


if __name__ == "__main__":
    main()
