"""Make the pictures of docs/pictures: ``python docs/make_pictures.py [FOLDER]``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import gpudist
from gpudist.geometry import SlidingWindow

FOLDER = Path(__file__).parent / "pictures"
THREE = SlidingWindow(3, padding=(1, 1))
FIVE = SlidingWindow(5, padding=(2, 2))


def line_of_2(path: Path) -> None:
    gpudist.draw([20], [2], window=[FIVE], path=path)


def images_over_4(path: Path) -> None:
    gpudist.draw([8, 3, 64, 48], [1, 1, 2, 2], window=[THREE, THREE], path=path)


def nested_over_64(path: Path) -> None:
    gpudist.draw([256, 250], [8, 8], window=[FIVE, FIVE], nested=True, path=path)


def volume_over_64(path: Path) -> None:
    gpudist.draw([1, 4, 64, 64, 64], [1, 1, 4, 4, 4], window=[THREE] * 3, path=path)


def repartition_over_4(path: Path) -> None:
    gpudist.draw([64, 48], [4, 1], [1, 4], path=path)


PICTURES: dict[str, Callable[[Path], None]] = {
    "line-2.svg": line_of_2,
    "images-4.svg": images_over_4,
    "nested-64.svg": nested_over_64,
    "volume-64.svg": volume_over_64,
    "repartition-4.svg": repartition_over_4,
}


def main() -> None:
    """Make all of them."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in PICTURES.items():
        make(folder / name)


if __name__ == "__main__":
    main()
