"""Training images of LeNet-5: MNIST from its four files, or scikit-learn's small digits."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

CLASSES = 10
_SPLIT_SEED = 0
_DIGITS_TESTED = 360
_DIGITS_EXTENT = 32
_MNIST_EXTENT = 28
_IDX_UINT8 = 0x0800


class DataError(ValueError):
    """A data file is missing or damaged, or has unexpected contents."""


@dataclass
class Images:
    """Images ``[N, 1, height, width]``, float32, and their classes ``[N]``."""

    images: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def cut(self, box: tuple[slice, ...]) -> Images:
        """Copy the same cells of every image to new memory; labels are unchanged."""
        return Images(self.images[(slice(None), *box)].clone(), self.labels)


def load(data: str) -> tuple[Images, Images]:
    """Load the training and the test set, normalised by mean and deviation of the training set.

    Args:
        data: ``"digits"``, or the directory of MNIST's four gzipped IDX files.

    Raises:
        DataError: a file is missing or damaged, or has unexpected contents.
    """
    train, test = _digits() if data == "digits" else _mnist(Path(data))
    mean, deviation = train.images.mean(), train.images.std()
    for part in (train, test):
        part.images.sub_(mean).div_(deviation)
    return train, test


def _digits() -> tuple[Images, Images]:
    """Load 1797 digits of 8 x 8 pixels, up-sampled to 32 x 32; 360 of them form the test set."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    small = torch.from_numpy(np.asarray(pixels, np.float32)).view(-1, 1, 8, 8)
    images = torch.nn.functional.interpolate(
        small, size=(_DIGITS_EXTENT, _DIGITS_EXTENT), mode="bilinear", align_corners=False
    )
    classes = torch.from_numpy(np.asarray(labels, np.int64))
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(_SPLIT_SEED))
    tested, trained = order[:_DIGITS_TESTED], order[_DIGITS_TESTED:]
    return Images(images[trained], classes[trained]), Images(images[tested], classes[tested])


def _mnist(directory: Path) -> tuple[Images, Images]:
    if not directory.is_dir():
        raise DataError(
            f"{directory} is not a directory; give 'digits', or the directory of MNIST's four "
            f"files, such as train-images-idx3-ubyte.gz"
        )
    return _mnist_part(directory, "train"), _mnist_part(directory, "t10k")


def _mnist_part(directory: Path, part: str) -> Images:
    pixels = _read_idx(directory / f"{part}-images-idx3-ubyte.gz", dims=3)
    labels = _read_idx(directory / f"{part}-labels-idx1-ubyte.gz", dims=1)
    extents = pixels.shape[1:]
    if extents != (_MNIST_EXTENT, _MNIST_EXTENT):
        raise DataError(
            f"{directory}: the {part} images have {extents[0]} x {extents[1]} pixels, not "
            f"{_MNIST_EXTENT} x {_MNIST_EXTENT}"
        )
    if len(pixels) != len(labels) or not len(labels):
        raise DataError(f"{directory}: {len(pixels)} {part} images but {len(labels)} labels")
    if labels.max() >= CLASSES:
        raise DataError(
            f"{directory}: a {part} label is {labels.max()}, but the classes are 0 to {CLASSES - 1}"
        )
    images = torch.from_numpy(pixels.astype(np.float32)).unsqueeze(1)
    return Images(images, torch.from_numpy(labels.astype(np.int64)))


def _read_idx(path: Path, dims: int) -> np.ndarray:
    """Read a gzipped IDX file of bytes: magic and an extent per dim, big-endian; then the cells."""
    try:
        with gzip.open(path, "rb") as file:
            content = file.read()
    except (OSError, EOFError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    header_bytes = 4 * (1 + dims)
    if len(content) < header_bytes:
        raise DataError(f"{path} ends within its header: {len(content)} of {header_bytes} bytes")
    magic, *extents = (int(n) for n in np.frombuffer(content, ">u4", 1 + dims))
    if magic != _IDX_UINT8 + dims:
        raise DataError(
            f"{path} starts with {magic:#010x}, not {_IDX_UINT8 + dims:#010x}: it is not an IDX "
            f"file of bytes in {dims} dims"
        )
    cells = np.frombuffer(content, np.uint8, offset=header_bytes)
    if cells.size != np.prod(extents):
        raise DataError(f"{path} holds {cells.size} cells, but its header says {extents}")
    return cells.reshape(extents)
