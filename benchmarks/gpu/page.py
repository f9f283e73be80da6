"""Tables of benchmarks/RESULTS.md on one GPU, from rows: ``python -m benchmarks.gpu.page``.

``--predict`` first writes the planner's predictions beside the rows of the steps, anew.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.files import RESULTS
from benchmarks.gpu.packing import SECTOR
from examples.networks import UNet3d
from gpudist.planning import plan

H200 = RESULTS / "gpu" / "h200"
# Later runs, of what has changed since the first.
MESSAGES = RESULTS / "gpu" / "h200_236373a0"
LATEST = RESULTS / "gpu" / "h200_87e8f5fd"
PREDICTED = "predicted"
# Bytes that device memory moves at a time: two sectors.
ATOM = 2 * SECTOR
Json = dict[str, Any]


def main() -> None:
    if "--predict" in sys.argv:
        lines = [
            json.dumps({"side": side, "predicted_ms": round(predicted_ms(H200, side), 3)}) + "\n"
            for side in sorted(float32_steps())
        ]
        (H200 / f"{PREDICTED}.jsonl").write_text("".join(lines), encoding="utf-8")
    print(tables())


def tables(folder: Path = H200) -> str:
    """Return all tables in Markdown, each after its heading."""
    made: list[tuple[str, Callable[[Path], str]]] = [
        ("Packing", packing),
        ("A halo within the GPU", halos),
        ("Messages of the GPU to itself", messages),
        ("A training step of a U-Net", unet),
        ("The planner's part of that step", planner),
        ("Norms and dropout of a split tensor", local_costs),
        ("Convolutions beside a halo", overlap),
    ]
    return "\n\n".join(f"### {heading}\n\n{table(folder)}" for heading, table in made)


def packing(folder: Path) -> str:
    """Rates of packing over dtypes, by the length of contiguous rows."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows_of(folder, "bench-packing"):
        if row["peer"] != "copy_":
            continue
        case, length = row["case"].split(", rows of ")
        what = case.split()[0]
        found.setdefault(length, {}).setdefault(what, []).append(1 / row["ratio"])
    shares = {
        length: [
            span([f"{100 * share:.0f}" for share in sorted(by_what[what])]) + " %"
            for what in ("pack", "unpack", "add")
        ]
        for length, by_what in found.items()
    }
    shown = table(
        ["rows of", "pack", "unpack", "add"],
        [[length, *cells] for length, cells in shares.items()],
    )
    return f"{shown}\n\n{_model_of_short_rows(found['32 B'])}"


def _model_of_short_rows(shares: dict[str, list[float]]) -> str:
    """Bytes of device memory for each row of a sector, by a model, and by the times."""
    copied = 2 * SECTOR
    packed = ATOM + SECTOR
    unpacked = SECTOR + 2 * ATOM
    by_time = [
        span([f"{copied / share:.0f}" for share in sorted(shares[w], reverse=True)])
        for w in ("pack", "unpack")
    ]
    return (
        f"A model of rows of {SECTOR} B, which nothing here measures: device memory moves {ATOM} B "
        f"at a time. A copy moves {copied} B for\neach row; packing moves {packed} B "
        f"({packed / copied:.1f} times), since it reads the other half, and unpacking up to "
        f"{unpacked} B ({unpacked / copied:.1f} times), if it\nreads both halves and writes both. "
        f"At the rate of the copy, the times of the table are those of {by_time[0]} and "
        f"{by_time[1]} B."
    )


def halos(folder: Path) -> str:
    subjects = (("forward", "self_halo", "torch pad"), ("adjoint", "adjoint", "torch pad backward"))
    cells: list[list[str]] = []
    for way, subject, torchs in subjects:
        peers: dict[str, dict[str, Json]] = {}
        name = f"bench-{subject}"
        for row in rows_of(LATEST, subject) if subject == "self_halo" else rows_of(folder, name):
            if row["subject"] == subject and not row["case"].endswith("graph"):
                peers.setdefault(row["case"].removesuffix(", eager"), {})[row["peer"]] = row
        for case, rows in peers.items():
            copied = rows.get("copy_")
            ours = rows[torchs]
            copy = us(copied["peer_us_median"]) if copied else ""
            cells.append([case, way, us(ours["us_median"]), copy, us(ours["peer_us_median"])])
    return table(["block", "way", "gpudist", "copy of as many bytes", "torch's pad"], cells)


def messages(folder: Path) -> str:
    cells: list[list[str]] = []
    for case, found in _by_way(MESSAGES, "self_messages").items():
        number, extent = case.split(" neighbours of ")
        if extent in ("16^3", "64^3", "256^3"):
            ways = (("eager", "device"), ("eager", "enqueue"), ("graph", "enqueue"))
            shown = [us(found[way]["us_median"]) for way in ways]
            cells.append([f"{number} of a block of {extent}", *shown])
    return table(["messages", "on the GPU", "host", "host, captured"], cells)


def unet(folder: Path) -> str:
    """Steps of the converted network in a world of one and of torch's own."""
    cells: list[list[str]] = []
    for case, found in _by_way(LATEST, "unet_step").items():
        volume, _, how = case.partition(", ")
        steps = [found.get((way,)) for way in ("eager", "host", "graph")]
        pairs = [
            f"{row['us_median'] / 1e3:.1f} / {row['peer_us_median'] / 1e3:.1f} ms" if row else ""
            for row in steps
        ]
        eager = found[("eager",)]
        peak = f"{eager['peak_mib']:.0f} / {eager['peer_peak_mib']:.0f} MiB"
        cells.append([volume, how, *pairs, peak])
    return table(["volume", "how", "step", "host", "captured step", "peak memory"], cells)


def _by_way(folder: Path, name: str) -> dict[str, dict[tuple[str, ...], Json]]:
    """Return the rows of a file by their case, and by the words at its end that say how."""
    ways = {"eager", "graph", "host", "device", "enqueue"}
    found: dict[str, dict[tuple[str, ...], Json]] = {}
    for row in rows_of(folder, name):
        words = row["case"].split(", ")
        case = ", ".join(word for word in words if word not in ways)
        found.setdefault(case, {})[tuple(word for word in words if word in ways)] = row
    return found


def predicted_ms(folder: Path, side: int) -> float:
    """Return the planner's milliseconds of a step, from the profile measured on that GPU."""
    (profile,) = folder.glob("profile*.json")
    (advice, *_) = plan(UNet3d(1, 3, 16), (1, 1, side, side, side), 1, profile)
    return 1e3 * advice.seconds


def float32_steps() -> dict[int, dict[str, float]]:
    """Return milliseconds of contiguous float32 steps, by the side of the volume."""
    return {
        int(case.partition("^")[0]): {
            "captured": found[("graph",)]["us_median"] / 1e3,
            "eager": found[("eager",)]["us_median"] / 1e3,
            "torch's eager": found[("eager",)]["peer_us_median"] / 1e3,
        }
        for case, found in _by_way(LATEST, "unet_step").items()
        if case.endswith("fp32, contiguous")
    }


def planner(folder: Path) -> str:
    """Predictions beside measured steps, with the ratio of the two."""
    steps = float32_steps()
    cells: list[list[str]] = []
    for row in rows_of(folder, PREDICTED):
        predicted = row["predicted_ms"]
        shown = [f"{ms:.1f} ms, {predicted / ms:.2f}" for ms in steps[row["side"]].values()]
        cells.append([f"{row['side']}^3", f"{predicted:.1f} ms", *shown])
    header = ["volume", "predicted", "captured, ratio", "eager, ratio", "torch's eager, ratio"]
    return table(header, cells)


def local_costs(folder: Path) -> str:
    """Norms and random numbers, both ways where there are two, beside torch's and a copy."""
    peers: dict[str, dict[str, Json]] = {}
    for row in rows_of(LATEST, "norms"):
        if row["subject"] in ("norms", "dropout") and not row["case"].endswith(("enqueue", "host")):
            kind = "copy" if row["peer"] == "copy_" else "torch"
            peers.setdefault(row["case"].replace("_", " "), {})[kind] = row
    cells = [
        [
            case,
            us(found["torch"]["us_median"]),
            us(found["torch"]["peer_us_median"]),
            us(found["copy"]["peer_us_median"]) if "copy" in found else "",
        ]
        for case, found in peers.items()
    ]
    return table(["what", "gpudist", "torch", "copy of as many bytes"], cells)


def overlap(folder: Path) -> str:
    cells = [
        [row["case"], us(row["us_median"]), row["peer"], us(row["peer_us_median"])]
        for row in rows_of(LATEST, "norms")
        if row["subject"] == "overlap" and row["peer"] == "convolution alone"
    ]
    return table(["block", "during a halo", "peer", "peer's time"], cells)


def span(numbers: Sequence[str]) -> str:
    return numbers[0] if numbers[0] == numbers[-1] else f"{numbers[0]} to {numbers[-1]}"


def rows_of(folder: Path, name: str) -> Iterator[Json]:
    """Yield the rows of a file, without its environment."""
    for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
        row: Json = json.loads(line)
        if "environment" not in row:
            yield row


def us(value: float) -> str:
    return f"{value / 1000:.2f} ms" if value >= 1000 else f"{value:.3g} us"


def table(header: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *cells]
    return "\n".join(
        f"|{'|'.join(line)}|" if line[0] == "---" else f"| {' | '.join(line)} |" for line in lines
    )


if __name__ == "__main__":
    main()
