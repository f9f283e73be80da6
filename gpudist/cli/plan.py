"""``gpudist plan``: find a fast partition of a network, before any worker is started."""

from __future__ import annotations

import argparse
import importlib
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from textwrap import fill
from typing import Any

import torch
from torch import nn

from gpudist.cli.command import print_json
from gpudist.cli.progress import Progress
from gpudist.cli.tables import print_columns
from gpudist.convert.network_plan import NetworkPlan
from gpudist.errors import ShapeError
from gpudist.pictures.page import require_picture, save
from gpudist.planning.advice import Advice, plan
from gpudist.planning.fitting import Fit, fits, numbers_to_show, smallest
from gpudist.planning.hardware import Profile, profile_of
from gpudist.planning.layout_search import search
from gpudist.planning.picture import picture_of
from gpudist.planning.table import (
    FIT_HEADING,
    MEMORY_HEADING,
    MESSAGE_HEADING,
    ORIGIN,
    TIME_HEADING,
    UNCOUNTED,
    choice,
    facts,
    fit_facts,
    fit_rows,
    fit_verdict,
    memory_rows,
    message_rows,
    time_rows,
    verdict,
)

_AMP = {"bf16": torch.bfloat16, "fp16": torch.float16}


def run(arguments: argparse.Namespace) -> int:
    """Print the verdict, and the grids that fit or the fastest, or search a plan and print it."""
    edits = None if arguments.plan is None else NetworkPlan.load(arguments.plan)
    if edits is not None and edits.grid is not None and arguments.ranks is None:
        arguments.ranks = prod(edits.grid)
    _require_fitting(arguments)
    profile = profile_of(arguments.profile)
    if arguments.memory is not None:
        if arguments.memory <= 0:
            raise ShapeError(f"--memory {arguments.memory:g}: give a positive number of GiB")
        profile = replace(profile, memory_gib=arguments.memory)
    network = _network(arguments.network)
    shapes = [_shape(words) for words in arguments.shape]
    how: dict[str, Any] = dict(
        replicate_parameters=not arguments.one_owner, optimizer=arguments.optimizer,
        recompute=arguments.recompute, amp=_AMP.get(arguments.amp), progress=Progress(),
    )  # fmt: skip
    layouts: NetworkPlan | None = None
    # Rehearsals of all partitions give the same warnings, from lines that are not the user's.
    with warnings.catch_warnings(record=True) as caught:
        if arguments.search:
            # Blocks are recomputed if nothing fits otherwise.
            how["recompute"] = arguments.recompute or None
            workers = None if arguments.grid else arguments.ranks
            layouts = search(network, shapes, arguments.grid, profile, workers=workers, **how)
        elif arguments.ranks is None:
            all_fits = fits(network, shapes, profile=profile, **how)
        else:
            advice = plan(
                network, shapes, arguments.ranks, profile,
                best=arguments.best, every_rank=arguments.every_rank, plan=edits,
                grid=arguments.grid, **how,
            )  # fmt: skip
    for text in dict.fromkeys(str(warning.message) for warning in caught):
        print(f"gpudist plan: warning: {text}", file=sys.stderr)
    if layouts is not None:
        _show_plan(layouts, arguments.output, arguments.json)
        return 0
    if arguments.ranks is None:
        if arguments.json:
            print_json([fit_facts(each) for each in all_fits])
        else:
            _show_fits(all_fits, profile, arguments.all)
        return 0
    if arguments.output is not None:
        words = f"{arguments.network}, {arguments.shape} on {arguments.ranks} ranks, {profile.name}"
        save(picture_of(advice, words), arguments.output)
    if arguments.json:
        print_json([facts(each) for each in advice])
    else:
        _show(advice, profile)
    return 0


def _require_fitting(arguments: argparse.Namespace) -> None:
    """Check that no option is given without the one it belongs to."""
    searches, has_plan = arguments.search, arguments.plan is not None
    path, workers = arguments.output, prod(arguments.grid or ())
    picture = path is not None and not searches
    if path is not None and not searches:
        require_picture(path)
    elif path is not None and path.suffix in (".svg", ".png", ".pdf"):
        raise ShapeError(f"{path}: --search writes a plan, not a picture; name a .json")
    for is_wrong, words in (
        (arguments.all and (searches or arguments.ranks is not None),
         "--all prints every number of workers, and does not belong to --ranks or --search"),
        (picture and arguments.ranks is None,
         "--output draws partitions of a number of workers; give --ranks"),
        (arguments.grid is not None and not (has_plan or searches),
         "--grid belongs to --plan or --search, which are not given"),
        (has_plan and arguments.ranks is None,
         "--plan is planned for a number of workers; give --ranks"),
        (searches and (arguments.best is not None or arguments.every_rank),
         "--best and --every-rank do not belong to --search"),
        (searches and None not in (arguments.grid, arguments.ranks) and workers != arguments.ranks,
         f"--grid has {workers} workers, but --ranks is {arguments.ranks}"),
    ):  # fmt: skip
        if is_wrong:
            raise ShapeError(words)


def _show_plan(layouts: NetworkPlan, path: Path | None, as_json: bool) -> None:
    if path is not None:
        layouts.save(path)
    if as_json:
        print(layouts.to_text())
        return
    for line in str(layouts).splitlines():
        _print(line, "  ")
    if not layouts.layouts:
        _print("No other layouts save time.")
    if path is not None:
        _print(f"Written to {path}, for gpudist.Plan.load and --plan.")


def _show(advice: Sequence[Advice], profile: Profile) -> None:
    _print(verdict(advice, profile))
    print()
    for heading, rows in (
        (TIME_HEADING, time_rows(advice)),
        (MESSAGE_HEADING, message_rows(advice)),
        (MEMORY_HEADING, memory_rows(advice)),
    ):
        print_columns(heading, rows)
        print()
    _print(choice(advice))
    _print(f"{ORIGIN}: {profile.source}. {UNCOUNTED}")
    if not all(each.is_total for each in advice):
        _print("<= is a bound, as if all ranks sent as much as the busiest; see --every-rank.")


def _show_fits(all_fits: Sequence[Fit], profile: Profile, every: bool) -> None:
    _print(fit_verdict(all_fits, profile.memory_gib))
    best = smallest(all_fits)
    if not every:
        chosen = numbers_to_show([fit.ranks for fit in all_fits], best and best.ranks)
        all_fits = [fit for fit in all_fits if fit.ranks in chosen]
    print()
    print_columns(FIT_HEADING, fit_rows(all_fits))
    print()
    _print(
        "Memory is counted from a step without data. Parameters include gradients and optimizer, "
        f"temporary tensors include staging. {UNCOUNTED}"
    )
    if not all(fit.is_counted for fit in all_fits):
        _print("~ is estimated from the nearest number that was counted.")
    if not every:
        _print("--all prints every number from 1 to 64.")


def _print(text: str, indent: str = "") -> None:
    print(fill(text, 80, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False))


def _shape(words: Sequence[str]) -> Any:
    """Return a shape, or a tensor without data if a dtype follows it."""
    *extents, last = words
    dtype = getattr(torch, last, None)
    if not isinstance(dtype, torch.dtype):
        dtype, extents = None, [*words]
    try:
        shape = tuple(map(int, extents))
    except ValueError:
        raise ShapeError(
            f"--shape {' '.join(words)}: separate numbers by spaces, as in 1 1 64 64; a dtype of "
            "torch may follow, as in 8 1024 int64"
        ) from None
    return shape if dtype is None else torch.empty(shape, dtype=dtype, device="meta")


def _network(name: str) -> Any:
    """Import ``module:name`` or ``file.py:name``, and call it if it is a function or a class."""
    module, colon, attribute = name.rpartition(":")
    if not colon:
        raise ShapeError(f"{name}: give the network as MODULE:NAME or FILE.py:NAME")
    path = Path(module)
    folder = str(path.resolve().parent) if path.suffix == ".py" else ""
    sys.path.insert(0, folder)
    try:
        network: Any = importlib.import_module(path.stem if folder else module)
        for part in attribute.split("."):
            network = getattr(network, part)
    # A user's module may raise any exception during its import.
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
        raise ShapeError(f"{name}: {words}; give it as MODULE:NAME or FILE.py:NAME") from error
    finally:
        sys.path.remove(folder)
    if not isinstance(network, (nn.Module, list, tuple)):
        network = _call(name, network)
    layers: Any = [network] if isinstance(network, nn.Module) else network
    if not isinstance(layers, (list, tuple)) or not all(isinstance(x, nn.Module) for x in layers):
        raise ShapeError(
            f"{name} is {type(network).__name__}, not a torch module or a list of layers"
        )
    return network


def _call(name: str, make: Any) -> Any:
    try:
        return make()
    except Exception as error:
        raise ShapeError(f"{name}: called without arguments, it fails: {error}") from error
