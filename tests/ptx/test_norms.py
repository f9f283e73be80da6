"""Random launches of the normalization kernels in nvcc's PTX, and their registers."""

from __future__ import annotations

import pytest

from tests.doubles.build import NoCompiler
from tests.every import EVERY
from tests.ptx import machine_code
from tests.ptx.build import ARCHITECTURES, NoNvcc, compiled_kernels, objects
from tests.ptx.launches import LEAST_COVERED, launch
from tests.ptx.test_ptx import MOST_REGISTERS

UNIT = "norm_kernels"
# A sample leaves some kinds of cells, parameters and steps out.
LAUNCHES, LEAST = (600, LEAST_COVERED) if EVERY else (96, 0.88)


@pytest.fixture(scope="module", autouse=True)
def compilers() -> None:
    try:
        compiled_kernels(90, UNIT)
        objects([])
    except (NoNvcc, NoCompiler) as error:
        pytest.skip(str(error))


def test_random_launches_do_what_the_host_does():
    """The host runs the same bodies, and loops in extended precision judge both."""
    found = launch(90, LAUNCHES, 1, UNIT)
    assert found.wrong == ""
    assert found.covered >= LEAST, found.missed


@pytest.mark.parametrize("architecture", ARCHITECTURES if EVERY else ARCHITECTURES[-1:])
def test_kernels_fit_the_registers(architecture: int):
    found = machine_code.spills(architecture, UNIT)
    assert len(found) == 76
    for kernel, (registers, spilled_bytes) in found.items():
        assert spilled_bytes == 0, f"{kernel} spills on sm_{architecture}"
        assert registers <= MOST_REGISTERS, f"{kernel} on sm_{architecture}"
