"""Tables of docs/results.md on one GPU, from committed rows: ``python -m benchmarks.gpu.page``.

``--predict`` first writes the planner's predictions beside the rows of the steps, anew.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.files import RESULTS
from examples.networks import UNet3d
from gpudist.planning import plan

H200 = RESULTS / "gpu" / "h200"
PREDICTED = "predicted"
Json = dict[str, Any]


def main() -> None:
    if "--predict" in sys.argv:
        lines = [
            json.dumps({"side": side, "predicted_ms": round(predicted_ms(H200, side), 3)}) + "\n"
            for side in sorted({side for side, _ in float32_steps(H200)})
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
    return table(
        ["rows of", "pack", "unpack", "add"],
        [[length, *cells] for length, cells in shares.items()],
    )


def halos(folder: Path) -> str:
    subjects = (("forward", "self_halo", "torch pad"), ("adjoint", "adjoint", "torch pad backward"))
    cells: list[list[str]] = []
    for way, subject, torchs in subjects:
        peers: dict[str, dict[str, Json]] = {}
        for row in rows_of(folder, f"bench-{subject}"):
            if not row["case"].endswith("graph"):
                peers.setdefault(row["case"].removesuffix(", eager"), {})[row["peer"]] = row
        for case, rows in peers.items():
            copied = rows.get("copy_")
            ours = rows[torchs]
            copy = us(copied["peer_us_median"]) if copied else ""
            cells.append([case, way, us(ours["us_median"]), copy, us(ours["peer_us_median"])])
    return table(["block", "way", "gpudist", "copy of as many bytes", "torch's pad"], cells)


def messages(folder: Path) -> str:
    cells = [
        [
            f"{row['neighbours']} of a block of {row['extent']}^3",
            f"{row['message_bytes']:,}",
            us(row["eager_device_us"]),
            us(row["eager_enqueue_us"]),
            us(row["graph_enqueue_us"]),
        ]
        for row in rows_of(folder, "self_messages")
        if row["extent"] in (16, 64, 256)
    ]
    return table(["messages", "bytes", "on the GPU", "host", "host, captured"], cells)


def unet(folder: Path) -> str:
    """Steps of torch's network and of the converted one in a world of one."""
    steps: dict[tuple[int, str, str], dict[str, Json]] = {}
    for row in rows_of(folder, "unet_step"):
        if "who" in row:
            key = row["side"], row["precision"], row["layout"]
            steps.setdefault(key, {})[row["who"]] = row
    cells = [
        [
            f"{side}^3",
            f"{precision}, {layout.removesuffix('_3d').replace('_', ' ')}",
            *(
                f"{pair['gpudist'][what]:.1f} / {pair['torch'][what]:.1f} ms"
                for what in ("step_ms", "host_ms", "graph_ms")
            ),
            f"{pair['gpudist']['peak_MiB']} / {pair['torch']['peak_MiB']} MiB",
        ]
        for (side, precision, layout), pair in steps.items()
    ]
    return table(["volume", "how", "step", "host", "captured step", "peak memory"], cells)


def predicted_ms(folder: Path, side: int) -> float:
    """Return the planner's milliseconds of a step, from the profile measured on that GPU."""
    (profile,) = folder.glob("profile*.json")
    (advice, *_) = plan(UNet3d(1, 3, 16), (1, 1, side, side, side), 1, profile)
    return 1e3 * advice.seconds


def float32_steps(folder: Path) -> dict[tuple[int, str], Json]:
    """Return the rows of contiguous float32 steps by their side and network."""
    return {
        (row["side"], row["who"]): row
        for row in rows_of(folder, "unet_step")
        if "who" in row and (row["precision"], row["layout"]) == ("fp32", "contiguous")
    }


def planner(folder: Path) -> str:
    """Predictions beside measured steps, with the ratio of the two."""
    steps = float32_steps(folder)
    cells: list[list[str]] = []
    for row in rows_of(folder, PREDICTED):
        side, predicted = row["side"], row["predicted_ms"]
        measured = [
            steps[side, who][what]
            for who, what in (("gpudist", "graph_ms"), ("gpudist", "step_ms"), ("torch", "step_ms"))
        ]
        shown = [f"{ms:.1f} ms, {predicted / ms:.2f}" for ms in measured]
        cells.append([f"{side}^3", f"{predicted:.1f} ms", *shown])
    header = ["volume", "predicted", "captured, ratio", "eager, ratio", "torch's eager, ratio"]
    return table(header, cells)


def local_costs(folder: Path) -> str:
    cells: list[list[str]] = []
    for row in rows_of(folder, "local_costs"):
        if row["what"] in ("norm group", "norm batch") and row["shape"][2] != 64:
            layout = "channels last" if row["channels_last"] else "contiguous"
            own, host = ("split_us", "split_host_us")
            what = f"{row['what'].removeprefix('norm ')} norm, {row['dtype']}, {layout}"
        elif row["what"] == "dropout":
            own, host = ("by_index_us", "by_index_host_us")
            what = "dropout, float32"
        else:
            continue
        cells.append(
            [
                what,
                f"[{','.join(map(str, row['shape']))}]",
                f"{us(row[own])} / {us(row['torch_us'])}",
                f"{us(row[host])} / {us(row['torch_host_us'])}",
            ]
        )
    return table(["what", "tensor", "on the GPU", "host"], cells)


def overlap(folder: Path) -> str:
    cells = [
        [row["case"], us(row["us_median"]), row["peer"], us(row["peer_us_median"])]
        for row in rows_of(folder, "bench-overlap")
        if row["peer"] in ("overlap=False", "convolution alone")
    ]
    return table(["block", "overlapped", "peer", "peer's time"], cells)


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
