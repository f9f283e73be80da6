"""Pictures of a segmented crop, with the blocks of the workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import gpudist
from gpudist import CartesianPartition
from gpudist.geometry import Decomposition


@torch.no_grad()
def draw_slices(
    folder: Path,
    training: Any,
    network: nn.Module,
    P_x: CartesianPartition,
    cells: tuple[slice, ...],
) -> None:
    """Write ``slices.png``: image, classes and prediction in the middle of the test's region.

    Collective; lines mark the boundaries between the workers' blocks.
    """
    corner = [(lo + hi - training.size) // 2 for lo, hi in training.volume.regions["test"]]
    x, classes = training.read("test", corner, cells)
    found = network(x).argmax(1, keepdim=True)
    blocks = (x, classes[:, None].float(), found.float())
    wholes = [gpudist.gather(block, P_x).cpu() for block in blocks]
    if P_x.rank != 0:
        return
    folder.mkdir(parents=True, exist_ok=True)
    from matplotlib import colormaps  # pyright: ignore
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # pyright: ignore
    from matplotlib.figure import Figure  # pyright: ignore
    from matplotlib.patches import Patch  # pyright: ignore

    size, middle = training.size, training.size // 2
    cut = Decomposition.balanced((size,) * 3, P_x.shape[2:])
    figure = Figure(figsize=(11, 8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 3)
    for row, (kept, name) in enumerate((((0, 1), "z"), ((0, 2), "y"))):
        for axis, whole, title in zip(axes[row], wholes, ("image", "truth", "found"), strict=True):
            volume = whole[0, 0].numpy()
            plane = volume[:, :, middle] if name == "z" else volume[:, middle, :]
            shown: dict[str, Any] = {"cmap": "gray"}
            if title != "image":
                shown = {"cmap": "viridis", "vmin": 0, "vmax": len(training.volume.classes) - 1}
            axis.imshow(plane.T, origin="lower", interpolation="nearest", **shown)
            for dim, line in zip(kept, (axis.axvline, axis.axhline), strict=True):
                for i in range(1, P_x.shape[2 + dim]):
                    line(cut.dims[dim].block(i)[0] - 0.5, color="red", linewidth=1)
            axis.set_title(f"{title}, {name} = {middle}")
            axis.set_xlabel("xyz"[kept[0]] + " in cells")
            axis.set_ylabel("xyz"[kept[1]] + " in cells")
    colours = colormaps["viridis"](torch.linspace(0, 1, len(training.volume.classes)).numpy())
    names = zip(colours, training.volume.classes, strict=True)
    patches = [Patch(color=colour, label=name) for colour, name in names]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches))
    figure.savefig(folder / "slices.png", dpi=120)
