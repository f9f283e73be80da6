"""Small networks of the zoo, and the detection of a wrong gradient."""

from __future__ import annotations

import pytest

from tests.zoo.judge import GRIDS, judge
from tests.zoo.networks import DOZEN, missing_packages

LIMIT_S = 60.0

needs_packages = pytest.mark.skipif(
    bool(missing_packages()),
    reason=f"not installed: {', '.join(missing_packages())}; `make zoo` installs them",
)
# Warnings of the packages are ignored.
pytestmark = pytest.mark.filterwarnings("ignore")


@needs_packages
@pytest.mark.parametrize("name", DOZEN)
def test_converted_network_is_right(name: str) -> None:
    found = judge(name, _grid_of(name), limit_s=LIMIT_S)
    assert found.verdict == "right", (found.what, found.error, found.text)
    assert found.planned_bytes == found.forward_bytes > 0
    assert found.sent_bytes > max(found.forward_bytes, found.repartitioned_bytes)
    assert found.messages > 0
    assert 0 < found.kept_bytes < found.alone_kept_bytes


@needs_packages
def test_network_under_a_searched_plan_is_right() -> None:
    found = judge("monai/unet_3d", "2x1", "searched", LIMIT_S)
    assert found.verdict == "right", (found.what, found.error, found.text)
    assert found.layouts > 0
    assert found.planned_bytes == found.forward_bytes > 0


@needs_packages
def test_gradient_that_is_a_thousandth_larger_on_one_rank_is_wrong() -> None:
    found = judge("monai/unet_3d", "2x2", "tampered", LIMIT_S)
    assert found.verdict == "wrong"
    assert found.error == pytest.approx(1e-3, rel=1e-3)
    assert found.what.startswith("gradient ")


def _grid_of(name: str) -> str:
    return list(GRIDS)[DOZEN.index(name) % len(GRIDS)]
