"""Draw partitions and the movements between them."""

from gpudist.pictures.draw import draw, draw_scene, save
from gpudist.pictures.scene import (
    Scene,
    StageTraffic,
    halo_scene,
    partition_scene,
    repartition_scene,
    traffic,
)

__all__ = [
    "Scene",
    "StageTraffic",
    "draw",
    "draw_scene",
    "halo_scene",
    "partition_scene",
    "repartition_scene",
    "save",
    "traffic",
]
