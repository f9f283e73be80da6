"""Contents of the pictures, counted by hand."""

from __future__ import annotations

import pytest

from gpudist.errors import PartitionError, ShapeError
from gpudist.geometry import SlidingWindow
from gpudist.pictures import halo_scene, partition_scene, repartition_scene, traffic
from gpudist.pictures.scene import busiest

THREE = SlidingWindow(3, padding=(1, 1))


def test_halo_of_two_ranks() -> None:
    scene = halo_scene([64, 48], [2, 1], [THREE, THREE])
    (moved,) = traffic(scene)
    assert moved.cells == {(0, 1): 48, (1, 0): 48}
    assert (moved.messages, moved.total_cells) == (2, 96)
    assert scene.needed == ((-1, -1), (31, -1))


def test_stages_of_a_nested_exchange() -> None:
    scene = halo_scene([8, 12], [2, 2], [THREE, THREE], nested=True)
    first, second = traffic(scene)
    assert first.cells == {(0, 2): 6, (2, 0): 6, (1, 3): 6, (3, 1): 6}
    # Four rows of the block, the ghosts of the first stage and the padding row.
    assert second.cells == {(0, 1): 6, (1, 0): 6, (2, 3): 6, (3, 2): 6}


def test_direct_exchange_also_meets_the_corners() -> None:
    scene = halo_scene([8, 12], [2, 2], [THREE, THREE])
    (moved,) = traffic(scene)
    assert moved.cells[0, 3] == 1 and moved.messages == 12


def test_windows_count_from_the_last_dim() -> None:
    scene = halo_scene([2, 3, 8, 8], [1, 1, 2, 1], [THREE, THREE])
    (moved,) = traffic(scene)
    assert moved.cells == {(0, 1): 2 * 3 * 8, (1, 0): 2 * 3 * 8}


def test_repartition_between_other_ranks() -> None:
    scene = repartition_scene([4, 6], [2, 1], [1, 2], source_ranks=[7, 3], target_ranks=[3, 9])
    assert scene.names == (3, 7, 9)
    (moved,) = traffic(scene)
    # 7 owns rows 0:2 and 3 rows 2:4; 3 gets columns 0:3 and 9 columns 3:6.
    assert moved.cells == {(1, 0): 6, (1, 2): 6, (0, 2): 6}


def test_busiest_rank_is_inside() -> None:
    assert busiest(halo_scene([9, 9], [3, 3], [THREE, THREE])) == 4


def test_nothing_moves() -> None:
    scene = partition_scene([8], [4], ranks=[4, 5, 6, 7])
    assert traffic(scene) == () and scene.names == (4, 5, 6, 7)


def test_too_many_ranks() -> None:
    with pytest.raises(PartitionError, match="513 ranks"):
        partition_scene([2000], [513])


def test_too_many_windows() -> None:
    with pytest.raises(ShapeError, match="3 windows for a tensor with 2 dims"):
        halo_scene([8, 8], [2, 2], [THREE] * 3)


def test_periodic_for_another_number_of_dims() -> None:
    with pytest.raises(ShapeError, match="periodic has 1 entries for 2 windows"):
        halo_scene([8, 8], [2, 2], [THREE] * 2, periodic=[True])
