"""ShardTensor of PhysicsNeMo: a scattered input, and a module whose weights are plain tensors.

It is written for CUDA. Around it, so that it runs on a CPU: torchvision's operators are declared,
which no case calls and whose wheel needs CUDA; its handlers are registered, which its package does
only if CUDA is available; the process group is made without the device that it names; and the one
function that asks for ``"cuda"``, which gathers the shapes of blocks, gets the CPU. Its geometry is
untouched.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module, metadata
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.overrides import TorchFunctionMode

from benchmarks.correctness.case import Case, Layout, backward, cotangent
from benchmarks.correctness.ranks import About, Result, whole, whole_gradient

OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_library: list[torch.library.Library] = []


class OnCpu(TorchFunctionMode):
    """Mode in which a tensor asked for on ``"cuda"`` is on the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)


def start() -> About:
    warnings.simplefilter("ignore")
    import_module("torch._dynamo")  # The first call imports it: once here, not in every rank.
    _library.append(torch.library.Library("torchvision", "DEF"))
    for schema in OPERATORS:
        _library[0].define(schema)
    import_module("physicsnemo.domain_parallel").register_custom_ops()
    specification: Any = import_module("physicsnemo.domain_parallel._shard_tensor_spec")
    gather = specification._gather_shard_shapes_for_dim
    specification._gather_shard_shapes_for_dim = _on_cpu(gather)
    version = metadata.version("nvidia-physicsnemo")
    return About(f"nvidia-physicsnemo {version}, torch {torch.__version__}", None)


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    def on_cpu(*arguments: Any, **options: Any) -> Any:
        with OnCpu():
            return function(*arguments, **options)

    return on_cpu


def join() -> None:
    """Make the process group, once."""
    manager = import_module("physicsnemo.distributed").DistributedManager
    if manager.is_initialized():
        return
    make = dist.init_process_group

    def without_device(*arguments: Any, device_id: Any = None, **options: Any) -> None:
        make(*arguments, **options)

    dist.init_process_group = without_device
    manager.initialize()
    dist.init_process_group = make


def run(case: Case, layout: Layout) -> Result:
    warnings.simplefilter("ignore")
    domain_parallel = import_module("physicsnemo.domain_parallel")
    join()
    names = ("first", "second")[: len(layout.grid)]
    mesh = init_device_mesh("cpu", layout.grid, mesh_dim_names=names)
    x = case.input(layout)
    places = [Shard(dim) for dim in layout.dims_of(x.shape)]
    x = domain_parallel.scatter_tensor(x, 0, mesh, places, requires_grad=True)
    net = case.module(layout)
    for name in names if list(net.parameters()) else ():
        domain_parallel.sync_module_over_mesh(net, mesh[name])
    with case.context():
        y = whole(net(x))
    backward(case, (y * cotangent(y.shape)).sum(), x, whole)
    return Result(y, whole_gradient(x), [whole_gradient(each) for each in net.parameters()])
