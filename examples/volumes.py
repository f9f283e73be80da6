"""Volumes to segment: the MNI152 template of the human brain, or separated phases."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

_MNI = ("t1", "gm", "wm")
_PHASE_STEPS = 100
_PHASE_STEP_SIZE = 0.1
_NOISE = 0.5


class DataError(ValueError):
    """Data is missing or too small."""


@dataclass
class Volume:
    """A volume of bytes in files, from which only slices are read.

    Attributes:
        classes: names of the classes; the first class holds all cells outside the others.
        image: the cells, an array or a file that can be sliced.
        shares: share of each cell in each class but the first: 0 to 255.
        regions: half-open ranges of cells per dim, for training and for the test.
    """

    classes: tuple[str, ...]
    image: Any
    shares: Sequence[Any]
    regions: dict[str, tuple[tuple[int, int], ...]]

    def read(
        self, part: str, corner: Sequence[int], cells: Sequence[slice]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read one block of a crop: image ``[1, 1, *cells]``, float32; classes ``[1, *cells]``.


        Args:
            part: ``"train"`` or ``"test"``; cells outside its region are zero.
            corner: first cell of the crop, in cells of the volume.
            cells: range of the block within the crop.
        """
        ranges = [(at + c.start, at + c.stop) for at, c in zip(corner, cells, strict=True)]
        region = self.regions[part]
        inside = [
            (min(max(a, lo), hi), max(min(b, hi), lo))
            for (a, b), (lo, hi) in zip(ranges, region, strict=True)
        ]
        taken = tuple(slice(a, max(a, b)) for a, b in inside)
        margins = [
            (t.start - a, b - t.stop) if t.stop > t.start else (b - a, 0)
            for t, (a, b) in zip(taken, ranges, strict=True)
        ]

        def block(file: Any) -> np.ndarray:
            return np.pad(np.asarray(file[taken], np.int16), margins)

        shares = [block(share) for share in self.shares]
        classes = np.argmax(np.stack([255 - np.sum(shares, axis=0), *shares]), axis=0)
        image = torch.from_numpy(block(self.image).astype(np.float32) / 128)
        return image[None, None], torch.from_numpy(classes)[None]

    def random_corner(self, part: str, size: int, generator: torch.Generator) -> tuple[int, ...]:
        """Return the corner of a random crop inside the region, or around a narrower region."""
        return tuple(
            lo + int(torch.randint(hi - lo - size + 1, (), generator=generator))
            if hi - lo >= size
            else (lo + hi - size) // 2
            for lo, hi in self.regions[part]
        )

    def corners(self, part: str, size: int, most: int) -> list[tuple[int, ...]]:
        """Return the evenly spaced corners of at most ``most`` crops that cover the region."""
        along: list[list[int]] = []
        for lo, hi in self.regions[part]:
            count = -(-(hi - lo) // size)
            room = hi - lo - size
            along.append(
                [lo + i * room // (count - 1) for i in range(count)]
                if count > 1
                else [lo + room // 2]
            )
        found = [(x, y, z) for x in along[0] for y in along[1] for z in along[2]]
        return found[:: -(-len(found) // most)]


def brain() -> Volume:
    """Open the MNI152 template in nilearn: T1, grey and white matter.

    197 x 233 x 189 cells of 1 mm.

    The left hemisphere is for training and the right one for the test. Slices are read from the
    compressed file without reading the rest.

    Source:
        Fonov et al. 2011, "Unbiased average age-appropriate atlases for pediatric studies".

    Raises:
        DataError: nilearn or nibabel is not installed.
    """
    missing = [name for name in ("nibabel", "nilearn") if importlib.util.find_spec(name) is None]
    if missing:
        raise DataError(
            f"{' and '.join(missing)} cannot be imported; pip install 'gpudist[examples]', or take "
            "--data phases"
        )
    import nibabel  # pyright: ignore[reportMissingImports]

    # Only the files are used: importing nilearn takes seconds.
    found = importlib.util.find_spec("nilearn")
    assert found is not None and found.origin is not None
    folder = Path(found.origin).parent / "datasets" / "data"
    paths = [folder / f"mni_icbm152_{name}_tal_nlin_sym_09a_converted.nii.gz" for name in _MNI]
    lost = [path for path in paths if not path.exists()]
    if lost:
        raise DataError(f"this nilearn has no {lost[0]}; install nilearn 0.10 to 0.14")
    image, *shares = [nibabel.load(path) for path in paths]  # pyright: ignore
    middle = round(-image.affine[0, 3])  # pyright: ignore
    first, *others = [(0, extent) for extent in image.shape]  # pyright: ignore
    regions = {"train": ((0, middle), *others), "test": ((middle, first[1]), *others)}
    files = [each.dataobj for each in (image, *shares)]  # pyright: ignore
    return Volume(("other", "grey matter", "white matter"), files[0], files[1:], regions)


def write_phases(folder: Path, size: int, seed: int) -> None:
    """Write a volume of ``[3 size, size, size]`` cells for :func:`phases`.

    Two phases separate from noise by the Allen-Cahn equation ``u_t = laplace(u) + u - u^3``:
    explicit Euler, second differences, periodic. The phase is where ``u > 0``; the image is ``u``
    blurred over 5 cells a side, with noise.
    """
    generator = np.random.default_rng(seed)
    u = generator.normal(0, 0.1, (3 * size, size, size)).astype(np.float32)
    for _ in range(_PHASE_STEPS):
        laplace = sum(np.roll(u, shift, dim) for dim in range(3) for shift in (1, -1)) - 6 * u
        u += _PHASE_STEP_SIZE * (laplace + u - u**3)
    blurred = u
    for dim in range(3):
        blurred = sum(np.roll(blurred, shift, dim) for shift in range(-2, 3)) / 5
    noisy = blurred + generator.normal(0, _NOISE, u.shape)
    np.save(folder / "image.npy", np.clip(128 + 64 * noisy, 0, 255).astype(np.uint8))
    np.save(folder / "phase.npy", np.where(u > 0, np.uint8(255), np.uint8(0)))


def phases(folder: Path) -> Volume:
    """Open the files of :func:`write_phases`, mapped into memory.

    The last third is the test region.
    """
    image, phase = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("image", "phase"))
    size = image.shape[1]
    rest = ((0, size), (0, size))
    regions = {"train": ((0, 2 * size), *rest), "test": ((2 * size, 3 * size), *rest)}
    return Volume(("first phase", "second phase"), image, [phase], regions)
