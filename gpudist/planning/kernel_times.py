"""Time the kernels of a network's plans on the device, in place of predicting them by rates."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from gpudist.checks.arguments import checked
from gpudist.nn.affine.local_conv import LocalConvolution
from gpudist.planning.first_worker import from_first
from gpudist.planning.hardware import Profile
from gpudist.world.partition import Partition

# Passes over all kernels, and the seconds of each kernel's repeated calls in a pass.
_ROUNDS, _REPEATED_S = 6, 5e-4
# Searches with the times so far, which may meet other kernels.
_SEARCHES = 4
# Value of all cells: no kernel is slow for it, as for numbers below the smallest normal one.
_VALUE = 0.5
_TORCHS = (torch.dtype, torch.layout, torch.memory_format)


class _Unknown(dict[str, float]):
    """Times that note the kernels that they lack."""

    def __init__(self, known: dict[str, float]) -> None:
        super().__init__(known)
        self.lacking: dict[str, None] = {}

    def get(self, key: str, default: Any = None) -> Any:
        if key and key not in self:
            self.lacking[key] = None
        return super().get(key, default)


@checked()
def timed_kernels(
    P_world: Partition,
    profile: Profile,
    planned: Callable[[Profile], object],
    progress: Callable[[str, int, int], None] | None = None,
) -> Profile:
    """Return a profile with the times of all kernels that plans of a network run on a rank.

    Rates predict kernels of usual sizes. Small blocks, unusual convolutions and kernels that torch
    chooses by size are better predicted by their own times::

        grid = P_x.shape
        timed = timed_kernels(P_world, profile, lambda p: search(network, shape, grid, p))
        plan = search(network, shape, P_x, timed)

    Collective over the world. All workers time a kernel at once, each on its own device, and the
    slowest one counts.

    Args:
        P_world: partition of all workers.
        profile: profile of this machine, such as :func:`measured_profile` returns.
        planned: function that plans with a profile, by :func:`plan`, :func:`search` or
            :func:`fits`. The first worker calls it, so it must not communicate: give it the shape
            of a grid or a number of workers. Plans by other times may meet other kernels, so it is
            called until there are none, at most four times.
        progress: function called with the next item, the number of finished items, and the total.

    Returns:
        The profile, whose ``kernels`` are the seconds by key, 0 for kernels that cannot be called
        alone, which are predicted by rates.

    Cost:
        About 5 ms for each kernel, and the plans. A search meets some hundred to 2,000 kernels.

    Raises:
        ShapeError: on every worker, if ``planned`` raises on the first.

    Source:
        Jia et al., Exploring Hidden Dimensions in Accelerating Convolutional Neural Networks
        (OptCNN), ICML 2018, section 5.1, which times every layer in every configuration.
    """

    def measure(keys: Sequence[str]) -> dict[str, float]:
        if progress is not None:
            progress(f"{len(keys)} kernels", 0, 1)
        return times_of(P_world, keys)

    def listed(known: Profile) -> list[str]:
        text = from_first(P_world, lambda: "\n".join(kernels_of(known, planned)))
        return text.split("\n") if text else []

    timed = with_times(profile, listed, measure)
    if progress is not None:
        progress("", 1, 1)
    return timed


def with_times(
    profile: Profile,
    lacking: Callable[[Profile], list[str]],
    measure: Callable[[Sequence[str]], dict[str, float]],
) -> Profile:
    """Return a profile with the times of the kernels that are lacking, until none is."""
    times = dict(profile.kernels or {})
    for _ in range(_SEARCHES):
        keys = lacking(replace(profile, kernels=times))
        if not keys:
            break
        times |= measure(keys)
    return replace(profile, kernels=times)


def kernels_of(profile: Profile, planned: Callable[[Profile], object]) -> list[str]:
    """Return the keys of kernels that ``planned`` meets, and whose times the profile lacks."""
    times = _Unknown(profile.kernels or {})
    planned(replace(profile, kernels=times))
    return list(times.lacking)


def times_of(P_world: Partition, keys: Sequence[str]) -> dict[str, float]:
    """Return the seconds of kernels; 0 for one that this device cannot run alone.

    Each is the smallest mean of several passes, so that others' short work does not count.
    """
    best = dict.fromkeys(keys, 0.0)
    for _ in range(_ROUNDS):
        for key in keys:
            P_world.barrier()
            seconds = _time(key, P_world.device)
            best[key] = min(best[key] or seconds, seconds)
    nanoseconds = [round(1e9 * best[key]) for key in keys]
    slowest = P_world.allreduce_data(nanoseconds, "max")
    # A kernel that fails on any worker counts as unknown.
    fails = P_world.allreduce_data([int(n == 0) for n in nanoseconds], "max")
    return {
        key: 0.0 if failed else 1e-9 * n
        for key, n, failed in zip(keys, slowest, fails, strict=True)
    }


def key_of(call: Any, args: Any, kwargs: Any) -> str:
    """Return the text from which :func:`times_of` repeats a call of a kernel; ``""`` if it cannot.

    It holds the operator's name and its arguments, with the shapes, strides and dtypes of tensors.
    """
    if call.namespace != "aten":
        return ""
    try:
        return json.dumps([str(call), *_described([list(args), kwargs])])
    # An argument of another type, such as a generator.
    except TypeError:
        return ""


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return {"": [list(value.shape), list(value.stride()), str(value.dtype)]}
    if isinstance(value, (list, tuple)):
        return [_described(item) for item in value]
    if isinstance(value, dict):
        return {name: _described(item) for name, item in value.items()}
    if isinstance(value, torch.device):
        return {"": "device"}
    return {"": str(value)} if isinstance(value, _TORCHS) else value


def _restored(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [_restored(item, device) for item in value]
    if not isinstance(value, dict):
        return value
    if "" not in value:
        return {name: _restored(item, device) for name, item in value.items()}
    what = value[""]
    if isinstance(what, str):
        return device if what == "device" else getattr(torch, what.removeprefix("torch."))
    shape, strides, name = what
    dtype = getattr(torch, name.removeprefix("torch."))
    fill = _VALUE if dtype.is_floating_point or dtype.is_complex else 0
    x = torch.empty_strided(shape, strides, dtype=dtype, device=device)
    return x if 0 in strides else x.fill_(fill)


def call_of(key: str, device: torch.device) -> Callable[[], object]:
    name, args, kwargs = json.loads(key)
    _, packet, overload = name.split(".")
    args, kwargs = _restored(args, device), _restored(kwargs, device)
    call = getattr(getattr(torch.ops.aten, packet), overload)
    if packet == "convolution" and not args[6]:
        x, weight, bias, stride, padding, dilation, _, _, groups = args
        convolve = LocalConvolution(tuple(stride), tuple(padding), tuple(dilation), groups)
        return lambda: convolve(x, weight, bias)
    if packet == "convolution_backward" and not args[7] and not args[10][2]:
        gradient, x, weight, _, stride, padding, dilation, _, _, groups, needs = args
        convolve = LocalConvolution(tuple(stride), tuple(padding), tuple(dilation), groups)
        return lambda: convolve.gradients(gradient, x, weight, needs)
    return lambda: call(*args, **kwargs)


def _time(key: str, device: torch.device) -> float:
    """Return the mean seconds of calls of a kernel; 0 if it cannot be called."""

    def wait() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    try:
        with torch.no_grad():
            call = call_of(key, device)
            call()
            start_s = wait()
            call()
            once_s = wait() - start_s
            repeats = max(1, min(20, int(_REPEATED_S / max(once_s, 1e-7))))
            start_s = wait()
            for _ in range(repeats):
                call()
            return (wait() - start_s) / repeats
    # Kernels that exist for other devices only, or read indices from their arguments.
    except (RuntimeError, NotImplementedError, IndexError, TypeError, ValueError):
        return 0.0
