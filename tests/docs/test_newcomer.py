"""Follow docs/tutorial.md to the letter, with nothing but the system and a checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, read
from tests.docs.sessions import run_session

LIMIT_S = 1500.0
# Where packages come from is the machine's affair.
KEPT = re.compile(r"PIP_.*|.*_proxy|SSL_CERT_\w+|REQUESTS_CA_BUNDLE", re.IGNORECASE)


@pytest.mark.newcomer
def test_the_tutorial_in_a_new_environment(tmp_path: Path) -> None:
    checkout, home = tmp_path / "checkout", tmp_path / "home"
    home.mkdir()
    copy_repository(checkout)
    environment = {name: text for name, text in os.environ.items() if KEPT.fullmatch(name)}
    environment |= {
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "PATH": os.pathsep.join([f"{sys.base_prefix}/bin", "/usr/local/bin", "/usr/bin", "/bin"]),
    }
    blocks = [block for block in read("docs/tutorial.md").blocks if not block.skipped]
    assert len([block for block in blocks if block.commands]) == 6
    printed = run_session(blocks, checkout, environment, LIMIT_S)

    def output(start: str) -> str:
        (found,) = [text for command, text in printed.items() if command.startswith(start)]
        return found

    operators = re.findall(r"^(\w+).*? (yes|NO) ", output("gpudist check"), re.MULTILINE)
    assert len(operators) >= 10 and {exact for _, exact in operators} == {"yes"}
    losses = output("python sequential.py").splitlines()
    assert len(losses) == 4
    assert output("torchrun").splitlines()[:4] == losses
    grids = re.findall(r"^\[1, 1, (\d), (\d)\]", output("gpudist plan"), re.MULTILINE)
    # The best three, by time and then by memory.
    assert len(grids) == 6 and grids[:3] == grids[3:]
    assert all(int(rows) * int(columns) == 8 for rows, columns in grids)
    picture = ElementTree.parse(checkout / "partition.svg").getroot()
    assert picture.tag == "{http://www.w3.org/2000/svg}svg"
    assert (checkout / ".venv" / "bin" / "gpudist").exists()


def copy_repository(folder: Path) -> None:
    """Copy the files that git tracks, as they are now, without anything built."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.strip("\0").split("\0"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
