"""Draw the pictures of docs/pictures: ``python docs/make_pictures.py [FOLDER]``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from torch import nn

import gpudist
from gpudist.geometry import SlidingWindow
from gpudist.pictures import save
from gpudist.pictures.page import figure_of
from gpudist.pictures.panels import ghosts_panel, map_panel
from gpudist.pictures.scene import scene_of
from gpudist.planning import picture_of, plan

FOLDER = Path(__file__).parent / "pictures"
THREE = SlidingWindow(3, padding=(1, 1))


def halo_over_4(path: Path) -> None:
    """Draw the picture of the first page: blocks, and what one worker needs of the others."""
    scene = scene_of([64, 48], [2, 2], window=[THREE, THREE])
    workers = (scene.source, scene.source_ranks)
    title = "Four workers: rank, and the cells of its block"
    panels = [
        map_panel(scene, workers, (0, 1), title, dict.fromkeys(range(4), "")),
        ghosts_panel(scene, (0, 1), 2),
    ]
    save(figure_of(panels, "A 64 x 48 image on four workers"), path)


def repartition_over_4(path: Path) -> None:
    gpudist.draw([64, 48], [4, 1], [1, 4], path=path)


def plan_for_64(path: Path) -> None:
    layers = [
        nn.Conv3d(1, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.MaxPool3d(2),
        nn.Conv3d(32, 64, 3, padding=1), nn.GroupNorm(4, 64), nn.ReLU(),
        nn.ConvTranspose3d(64, 32, 2, stride=2), nn.Conv3d(32, 1, 1),
    ]  # fmt: skip
    shape = (1, 1, 256, 256, 256)
    advice = plan(layers, shape, 64, "h100")
    save(picture_of(advice, f"Nine layers, {list(shape)} on 64 ranks, h100"), path)


PICTURES: dict[str, Callable[[Path], None]] = {
    "halo-4.svg": halo_over_4,
    "repartition-4.svg": repartition_over_4,
    "plan-64.svg": plan_for_64,
}


def main() -> None:
    """Draw all pictures."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in PICTURES.items():
        make(folder / name)


if __name__ == "__main__":
    main()
