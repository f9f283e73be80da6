"""``gpudist draw``: draw a partition and a movement on it."""

from __future__ import annotations

import argparse
from typing import Any

from gpudist.cli.command import print_json
from gpudist.cli.tables import print_table
from gpudist.convert.network_plan import NetworkPlan
from gpudist.errors import ShapeError
from gpudist.geometry import SlidingWindow
from gpudist.pictures.draw import draw_scene
from gpudist.pictures.layouts import layouts_panel, stretches_panel
from gpudist.pictures.page import figure_of, require_picture, save
from gpudist.pictures.scene import Scene, choose_rank, scene_of, traffic


def run(arguments: argparse.Namespace) -> int:
    """Write the picture, and print its content as text."""
    require_picture(arguments.output)
    facts: dict[str, Any] = {"picture": str(arguments.output)}
    if arguments.plan is not None:
        facts["layouts"] = _draw_plan(arguments)
        lines = [(name, str(value)) for name, value in facts.items()]
    else:
        scene = _scene(arguments)
        figure = draw_scene(scene, arguments.rank, arguments.dims, arguments.itemsize)
        save(figure, arguments.output)
        facts |= _facts(scene, arguments)
        lines = [("picture", facts["picture"]), ("ranks", str(len(scene.names)))]
        for number, stage in enumerate(facts["stages"]):
            text = f"{stage['messages']} messages, {stage['bytes']} bytes"
            lines.append((f"stage {number + 1}", text))
    if arguments.json:
        print_json(facts)
    else:
        print_table(lines)
    return 0


def _draw_plan(arguments: argparse.Namespace) -> int:
    if arguments.shape is not None or arguments.grid is not None:
        raise ShapeError("--plan is drawn alone, without --shape and --grid")
    plan = NetworkPlan.load(arguments.plan)
    title = plan.notes[0] if plan.notes else f"Layouts of {arguments.plan}"
    panels = [stretches_panel(plan)] if plan.stretches else []
    save(figure_of([*panels, layouts_panel(plan)], title), arguments.output)
    return len(plan.layouts)


def _scene(arguments: argparse.Namespace) -> Scene:
    shape, grid = arguments.shape, arguments.grid
    if shape is None or grid is None:
        raise ShapeError("--shape and --grid are needed, or --plan")
    if min(shape) < 1:
        raise ShapeError(f"--shape {' '.join(map(str, shape))} has no cells; give positive extents")
    _require_owner(arguments)
    # A single number applies to all dims from the first cut one to the last.
    cut = [dim for dim, parts in enumerate(grid) if parts > 1]
    dims = len(grid) - min(cut, default=len(grid) - 1)
    halo = window = None
    if arguments.halo is not None:
        halo = [(width, width) for width in _each(arguments.halo, dims)]
    elif arguments.kernel is not None:
        window = _windows(arguments, dims)
    return scene_of(
        shape, grid, arguments.to, window, halo, arguments.periodic, arguments.nested
    )  # fmt: skip


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


def _windows(arguments: argparse.Namespace, dims: int) -> list[SlidingWindow]:
    kernels = _each(arguments.kernel, dims)
    options: list[list[int]] = []
    for name in ("stride", "dilation", "padding"):
        options.append(_each(getattr(arguments, name), len(kernels)))
        if len(options[-1]) != len(kernels):
            raise ShapeError(
                f"--{name} has {len(options[-1])} numbers, but --kernel has {len(kernels)}"
            )
    return [
        SlidingWindow(kernel, stride, dilation, (padding, padding))
        for kernel, stride, dilation, padding in zip(kernels, *options, strict=True)
    ]


def _each(values: list[int], dims: int) -> list[int]:
    return values * dims if len(values) == 1 else values


def _facts(scene: Scene, arguments: argparse.Namespace) -> dict[str, Any]:
    stages = [
        {
            "messages": len(moved),
            "bytes": sum(moved.values()) * arguments.itemsize,
            "matrix": [
                [scene.names[sender], scene.names[receiver], cells * arguments.itemsize]
                for (sender, receiver), cells in sorted(moved.items())
            ],
        }
        for moved in traffic(scene)
    ]
    shown = scene.names[choose_rank(scene, arguments.rank)]
    return {"ranks": list(scene.names), "shown_rank": shown, "stages": stages}
