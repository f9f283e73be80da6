"""Contents of the pictures, counted by hand."""

from __future__ import annotations

import pytest

from gpudist import Partition, draw
from gpudist.geometry import SlidingWindow
from gpudist.pictures.scene import choose_rank, scene_of, traffic
from tests.pool import distributed

THREE = SlidingWindow(3, padding=(1, 1))


def test_halo_of_two_ranks() -> None:
    scene = scene_of([64, 48], [2, 1], window=[THREE, THREE])
    assert traffic(scene) == [{(0, 1): 48, (1, 0): 48}]


def test_stages_of_a_nested_exchange() -> None:
    first, second = traffic(scene_of([8, 12], [2, 2], window=[THREE, THREE], nested=True))
    assert first == {(0, 2): 6, (2, 0): 6, (1, 3): 6, (3, 1): 6}
    # Four rows of the block, the ghosts of the first stage and the padding row.
    assert second == {(0, 1): 6, (1, 0): 6, (2, 3): 6, (3, 2): 6}


def test_direct_exchange_also_meets_the_corners() -> None:
    (moved,) = traffic(scene_of([8, 12], [2, 2], window=[THREE, THREE]))
    assert moved[0, 3] == 1 and len(moved) == 12


def test_windows_count_from_the_last_dim() -> None:
    scene = scene_of([2, 3, 8, 8], [1, 1, 2, 1], window=[THREE, THREE])
    assert traffic(scene) == [{(0, 1): 2 * 3 * 8, (1, 0): 2 * 3 * 8}]


@distributed(ranks=4, transports=("loopback",))
def test_repartition_between_other_ranks(P_world: Partition) -> None:
    P_x = P_world.create_partition_inclusive([3, 1]).create_cartesian_topology_partition([2, 1])
    P_y = P_world.create_partition_inclusive([1, 2]).create_cartesian_topology_partition([1, 2])
    scene = scene_of([4, 6], P_x, P_y)
    assert scene.names == (1, 2, 3)
    # 3 owns rows 0:2 and 1 rows 2:4; 1 gets columns 0:3 and 2 columns 3:6.
    assert traffic(scene) == [{(0, 1): 6, (2, 0): 6, (2, 1): 6}]
    pytest.importorskip("matplotlib")
    written = [text.get_text() for text in draw([4, 6], P_x, P_y, rank=2).axes[0].texts]
    assert "3\nin 6" in written


def test_busiest_rank_is_inside() -> None:
    assert choose_rank(scene_of([9, 9], [3, 3], window=[THREE, THREE]), None) == 4


def test_nothing_moves() -> None:
    assert traffic(scene_of([8], [4])) == []
