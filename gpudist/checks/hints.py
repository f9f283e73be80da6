"""Errors about names that a module does not have, with the name that was probably meant."""

from __future__ import annotations

import sys
from difflib import get_close_matches

# Words of torch.distributed, NCCL, DTensor, FSDP and DistDL, in lower case without underscores.
WORDS = {
    "allreduce": "all_sum_reduce",
    "allgatherintotensor": "all_gather",
    "reduce": "sum_reduce",
    "reducescatter": "sum_scatter",
    "reducescattertensor": "sum_scatter",
    "alltoall": "repartition",
    "alltoallsingle": "repartition",
    "redistribute": "repartition",
    "send": "send_recv",
    "recv": "send_recv",
    "isend": "send_recv",
    "irecv": "send_recv",
    "batchisendirecv": "send_recv",
    "dtensor": "GlobalTensor",
    "distributetensor": "to_global",
    "shard": "split",
    "replicate": "gpudist.sbp.broadcast",
    "partial": "partial_sum",
    "distributemodule": "distribute",
    "parallelizemodule": "distribute",
    "fullyshard": "distribute",
    "fsdp": "distribute",
    "fullyshardeddataparallel": "distribute",
    "dataparallel": "distribute",
    "ddp": "distribute",
    "convert": "distribute",
    "initprocessgroup": "init",
    "mpipartition": "init",
    "initdevicemesh": "gpudist.init().grid",
    "devicemesh": "gpudist.init().grid",
    "getrank": "gpudist.init().rank",
    "getworldsize": "gpudist.init().size",
    "barrier": "gpudist.init().barrier",
    "load": "gpudist.checkpoint.load",
    "save": "gpudist.checkpoint.save",
    "functional": "torch.nn.functional, which takes global tensors",
    "synchronizedbatchnorm": "DistributedBatchNorm",
    "syncbatchnorm": "DistributedBatchNorm",
}
_ROOMS = ("", ".nn", ".ops", ".sbp", ".amp", ".data", ".checkpoint", ".planning", ".testing")


class MissingName(AttributeError):
    """A public module, or an object, does not have this name.

    The text is made when it is read, since ``hasattr`` and imports raise this error too.

    Args:
        module: full name of the module.
        missing: name that it does not have.
        kind: name of the object's class, if it is the object that does not have the name.
    """

    def __init__(self, module: str, missing: str, kind: str = "") -> None:
        super().__init__(module, missing, kind)

    def __str__(self) -> str:
        module, missing, kind = self.args
        owner = f"{kind!r} object" if kind else f"module {module!r}"
        text = f"{owner} has no attribute {missing!r}"
        hint = _hint(module, missing)
        return f"{text}; {hint}" if hint else text


def _hint(module: str, missing: str) -> str:
    homes: dict[str, list[str]] = {}
    for room in (f"gpudist{suffix}" for suffix in _ROOMS):
        for name in getattr(sys.modules.get(room), "__all__", ()):
            homes.setdefault(_plain(name), []).append(f"{room}.{name}")
    word = WORDS.get(_plain(missing), missing)
    places = homes.get(_plain(word))
    if places is None and word != missing:
        return f"use {word}"
    if places is None:
        close = get_close_matches(_plain(missing), homes, 1, 0.75)
        if not close:
            return ""
        places = homes[close[0]]

    def unlike(home: str) -> tuple[bool, bool]:
        room, _, name = home.rpartition(".")
        return name[0].isupper() != missing[0].isupper(), room != module

    best = min(places, key=unlike)
    return f"use {best}" if word != missing or _plain(missing) in homes else f"did you mean {best}?"


def _plain(name: str) -> str:
    return name.lower().replace("_", "").removeprefix("distributed")
