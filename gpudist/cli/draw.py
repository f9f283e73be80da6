"""``gpudist draw``: draw a partition and a movement on it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from gpudist.cli.command import print_json
from gpudist.cli.progress import Progress
from gpudist.cli.tables import print_table
from gpudist.convert.network_plan import NetworkPlan
from gpudist.errors import ShapeError
from gpudist.geometry import SlidingWindow
from gpudist.pictures import Scene, draw_scene, save, traffic
from gpudist.pictures.draw import choose_rank, require_picture, scene_of
from gpudist.pictures.layouts import layouts_panel, stretches_panel
from gpudist.pictures.page import figure_of


def run(arguments: argparse.Namespace) -> int:
    """Write the picture, and print its content as text."""
    require_picture(arguments.output)
    if arguments.plan is not None:
        return _draw_plan(arguments)
    shown = Progress(not arguments.json)
    shown("plans", 0, 3)
    scene = _scene(arguments)
    shown("picture", 1, 3)
    figure = draw_scene(scene, arguments.rank, arguments.dims, arguments.itemsize)
    shown(str(arguments.output), 2, 3)
    save(figure, arguments.output)
    shown("", 3, 3)
    facts = _facts(scene, arguments)
    if arguments.json:
        print_json(facts)
        return 0
    lines = [("picture", str(arguments.output)), ("ranks", str(len(scene.names)))]
    for number, stage in enumerate(facts["stages"]):
        text = f"{stage['messages']} messages, {stage['bytes']} bytes"
        lines.append((f"stage {number + 1}", text))
    print_table(lines)
    return 0


def _draw_plan(arguments: argparse.Namespace) -> int:
    if arguments.shape is not None or arguments.grid is not None:
        raise ShapeError("--plan is drawn alone, without --shape and --grid")
    plan = NetworkPlan.load(arguments.plan)
    title = plan.notes[0] if plan.notes else f"Layouts of {arguments.plan}"
    panels = [stretches_panel(plan)] if plan.stretches else []
    save(figure_of([*panels, layouts_panel(plan)], title), arguments.output)
    facts = {"picture": str(arguments.output), "layouts": len(plan.layouts)}
    if arguments.json:
        print_json(facts)
    else:
        print_table([(name, str(value)) for name, value in facts.items()])
    return 0


def _scene(arguments: argparse.Namespace) -> Scene:
    _require_fitting(arguments)
    halo = window = None
    dims = _count_moved_dims(arguments)
    if arguments.halo is not None:
        halo = [(width, width) for width in _each(arguments.halo, dims, "--halo")]
    elif arguments.kernel is not None:
        window = _windows(arguments, dims)
    return scene_of(
        arguments.shape, arguments.grid, arguments.to, window, halo, arguments.periodic,
        arguments.nested,
    )  # fmt: skip


def _require_fitting(arguments: argparse.Namespace) -> None:
    """Check the shape and what is given per dim against it, in the words of the command line."""
    if arguments.shape is None or arguments.grid is None:
        raise ShapeError("--shape and --grid are needed, or --plan")
    shape, dims = arguments.shape, len(arguments.shape)
    if min(shape) < 1:
        raise ShapeError(f"--shape {_words(shape)} has no cells; give positive extents")
    for name, grid in (("--grid", arguments.grid), ("--to", arguments.to)):
        if grid is not None and len(grid) != dims:
            raise ShapeError(
                f"--shape has {dims} numbers, but {name} has {len(grid)}; give {name} one axis per "
                "dim of the tensor, 1 for dims that are not cut"
            )
    for name, widths in (("--kernel", arguments.kernel), ("--halo", arguments.halo)):
        if widths is not None and len(widths) > dims:
            raise ShapeError(
                f"--shape has {dims} numbers, but {name} has {len(widths)}; give one for all dims "
                "that are cut, or at most one per dim"
            )
    if arguments.halo is not None and min(arguments.halo) < 0:
        raise ShapeError(f"--halo {_words(arguments.halo)}: give at least 0 cells per dim")
    for dim in arguments.dims or ():
        if not -dims <= dim < dims:
            raise ShapeError(f"--dims {dim}: --shape has {dims} dims, numbered 0 to {dims - 1}")
    _require_owner(arguments)


def _require_owner(arguments: argparse.Namespace) -> None:
    """Check that no option is given without the movement that it belongs to."""
    has_kernel, has_halo = arguments.kernel is not None, arguments.halo is not None
    for name, is_given, fits, owner in (
        ("--stride", arguments.stride != [1], has_kernel, "--kernel"),
        ("--dilation", arguments.dilation != [1], has_kernel, "--kernel"),
        ("--padding", arguments.padding != [0], has_kernel, "--kernel"),
        ("--periodic", arguments.periodic, has_kernel or has_halo, "--kernel or --halo"),
        ("--nested", arguments.nested, has_kernel or has_halo, "--kernel or --halo"),
    ):
        if is_given and not fits:
            raise ShapeError(f"{name} belongs to {owner}, which is not given")


def _words(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))


def _count_moved_dims(arguments: argparse.Namespace) -> int:
    # A single number applies to all dims from the first cut one to the last.
    cut = [dim for dim, parts in enumerate(arguments.grid) if parts > 1]
    return len(arguments.grid) - min(cut, default=len(arguments.grid) - 1)


def _windows(arguments: argparse.Namespace, dims: int) -> list[SlidingWindow]:
    kernels = _each(arguments.kernel, dims, "--kernel")
    options = [
        _each(values, len(kernels), name)
        for values, name in (
            (arguments.stride, "--stride"),
            (arguments.dilation, "--dilation"),
            (arguments.padding, "--padding"),
        )
    ]
    return [
        SlidingWindow(kernel, stride, dilation, (padding, padding))
        for kernel, stride, dilation, padding in zip(kernels, *options, strict=True)
    ]


def _each(values: list[int], dims: int, name: str) -> list[int]:
    # A single number applies to all dims.
    if len(values) == 1:
        return values * dims
    if name not in ("--kernel", "--halo") and len(values) != dims:
        raise ShapeError(f"{name} has {len(values)} numbers, but --kernel has {dims}")
    return values


def _facts(scene: Scene, arguments: argparse.Namespace) -> dict[str, Any]:
    stages = [
        {
            "messages": moved.messages,
            "bytes": moved.total_cells * arguments.itemsize,
            "matrix": [
                [scene.names[sender], scene.names[receiver], cells * arguments.itemsize]
                for (sender, receiver), cells in sorted(moved.cells.items())
            ],
        }
        for moved in traffic(scene)
    ]
    return {
        "picture": str(arguments.output),
        "ranks": list(scene.names),
        "shown_rank": scene.names[choose_rank(scene, arguments.rank)],
        "stages": stages,
    }
