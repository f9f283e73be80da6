"""Results of two training steps of a network of the zoo, by name, for comparison."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from gpudist.planning.rehearsal import KeptForBackward
from gpudist.sbp import GlobalTensor, broadcast, to_global
from tests.zoo.network import BATCH, Network

# Kinds of numbers, such as gradients; of each its names and whole tensors. No gradient is None.
Record = dict[str, dict[str, torch.Tensor | None]]

_SEED = 11
_OPTIMIZER: dict[str, Any] = {"lr": 1e-2, "weight_decay": 1e-2}
# Below this part of the largest number of its kind, a tensor's own numbers are noise.
_NOISE = 1e-4


def record_of(
    network: Network,
    net: nn.Module,
    fresh: nn.Module,
    given: Mapping[str, torch.Tensor],
    whole: Mapping[str, torch.Tensor],
    learned: Set[str],
    tamper: Callable[[nn.Module], None] | None = None,
    step: AbstractContextManager[Any] | None = None,
) -> Record:
    """Train ``net`` for one step, and ``fresh`` with its state and optimizer's for another.

    Args:
        network: what the zoo says about it.
        net: the network, or what it was converted to.
        fresh: a sequential network, of other weights.
        given: the inputs of ``net``, blocks for a converted one.
        whole: the whole inputs, for ``fresh``.
        learned: names of the inputs whose gradient is compared.
        tamper: called between backward and the step, to see that errors are found.
        step: entered around each part of the step of ``net``, but not while results are gathered.
    """
    step = nullcontext() if step is None else step
    given = _as_learned(given, learned)
    with step:
        outputs, loss = _trained(network, net, given)
    if tamper is not None:
        tamper(net)
    gradients = {name: p.grad for name, p in net.named_parameters()}
    found: Record = {
        "output": {name: y.detach() for name, y in outputs.items()},
        "loss": {"": loss.detach()},
        "gradient": dict(gradients),
        "input gradient": {name: x.grad for name, x in given.items() if name in learned},
        "buffer": dict(net.named_buffers()),
    }
    # The optimizer writes into what was found.
    found = {kind: {n: _whole(x) for n, x in these.items()} for kind, these in found.items()}
    parameters = list(net.parameters())
    if not parameters:
        return found
    # As large an epsilon keeps the noise of a gradient that is zero out of the step.
    largest = max(map(_largest, found["gradient"].values())) or 1.0
    optimizer = torch.optim.AdamW(parameters, eps=largest, **_OPTIMIZER)
    with step:
        optimizer.step()
    found["parameter"] = {name: _whole(p) for name, p in net.named_parameters()}
    found["second step"] = _continued(network, net, optimizer, fresh, whole)
    return found


def kept_bytes_of(
    network: Network, net: nn.Module, given: Mapping[str, torch.Tensor], learned: Set[str]
) -> int:
    """Return the bytes that a forward keeps for backward, without parameters and buffers."""
    given = _as_learned(given, learned)
    kept = KeptForBackward([*net.parameters(), *net.buffers()])
    with kept:
        network.call(net, given)
    return kept.nbytes


def has_drawn() -> bool:
    """Return whether the last record has drawn random numbers."""
    state = torch.get_rng_state()
    torch.manual_seed(_SEED)
    return not torch.equal(state, torch.get_rng_state())


def differences(expected: Record, found: Record) -> Iterator[tuple[float, str]]:
    """Largest error of each tensor, relative to the largest number, and what it is.

    Numbers are also compared with a small part of the largest of their kind: gradients that are
    zero but for rounding have no error of their own. What is missing or has another shape or dtype
    is infinitely wrong.
    """
    for kind in expected.keys() | found.keys():
        these, those = expected.get(kind, {}), found.get(kind, {})
        floor = _NOISE * max((_largest(x) for x in these.values()), default=0.0)
        for name in these.keys() | those.keys():
            what = f"{kind} {name}".strip()
            if name not in these or name not in those:
                missing = "expected, but missing" if name in these else "not expected"
                yield float("inf"), f"{what}: {missing}"
                continue
            x, y = these[name], those[name]
            if x is None or y is None:
                if x is not y:
                    yield float("inf"), f"{what}: None, where the other is not"
            elif x.shape != y.shape or x.dtype != y.dtype:
                yield (
                    float("inf"),
                    f"{what}: {list(y.shape)} of {y.dtype}, expected {list(x.shape)} of {x.dtype}",
                )
            elif x.numel():
                wide = torch.complex128 if x.is_complex() else torch.float64
                error = _largest(y.to(wide) - x.to(wide))
                scale = max(_largest(x), floor) or 1.0
                yield (error / scale if error == error else float("inf")), what


def tensors_in(output: Any, name: str = "") -> dict[str, torch.Tensor]:
    """Return all tensors of an output by their path."""
    if isinstance(output, torch.Tensor):
        return {name: output}
    parts: Iterator[tuple[str, Any]] = iter(())
    if isinstance(output, Mapping):
        parts = ((f"{name}.{key}", part) for key, part in output.items())
    elif isinstance(output, list | tuple):
        parts = ((f"{name}[{i}]", part) for i, part in enumerate(output))
    elif dataclasses.is_dataclass(output):
        fields = dataclasses.fields(output)
        parts = ((f"{name}.{f.name}", getattr(output, f.name)) for f in fields)
    return {key: x for place, part in parts for key, x in tensors_in(part, place).items()}


def _as_learned(given: Mapping[str, torch.Tensor], learned: Set[str]) -> dict[str, torch.Tensor]:
    return {n: x.detach().clone().requires_grad_(n in learned) for n, x in given.items()}


def _trained(
    network: Network, net: nn.Module, given: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return one forward and backward: the outputs and the loss."""
    torch.manual_seed(_SEED)
    outputs = tensors_in(network.call(net, given))
    if not outputs:
        raise AssertionError(f"{network.name}: no tensor in the output")
    loss = _loss(network, outputs)
    loss.backward()
    return outputs, loss


def _loss(network: Network, outputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if network.classes:
        (logits,) = outputs.values()
        return nn.functional.cross_entropy(logits, _like(torch.arange(BATCH), logits))
    terms = [y.square().mean() + y.sin().mean() for y in outputs.values() if y.is_floating_point()]
    return sum(terms[1:], terms[0])


def _like(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if not isinstance(y, GlobalTensor):
        return x
    return to_global(x, y.placement, [broadcast] * y.placement.partition.dim)


def _continued(
    network: Network,
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    fresh: nn.Module,
    whole: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor | None]:
    """Loss and parameters of a sequential network that goes on from here."""
    # Free what has been recorded: ranks that are threads hold it all at once.
    net.zero_grad()
    fresh.load_state_dict(_all_whole(net.state_dict()))
    moments = _all_whole(optimizer.state_dict())
    optimizer.state.clear()
    successor = torch.optim.AdamW(fresh.parameters(), lr=1.0)
    successor.load_state_dict(moments)
    del moments
    _, loss = _trained(network, fresh, whole)
    successor.step()
    return {"loss": loss.detach(), **{name: p.detach() for name, p in fresh.named_parameters()}}


def _whole(x: torch.Tensor | None) -> torch.Tensor | None:
    if x is None:
        return None
    return (x.full_tensor() if isinstance(x, GlobalTensor) else x).detach().clone()


def _all_whole(state: Any) -> Any:
    """Return a state dict, to be loaded without its global tensors."""
    if isinstance(state, torch.Tensor):
        return _whole(state)
    if isinstance(state, Mapping):
        return {key: _all_whole(value) for key, value in state.items()}
    if isinstance(state, list):
        return [_all_whole(value) for value in state]
    return copy.deepcopy(state)


def _largest(x: torch.Tensor | None) -> float:
    return float(x.detach().abs().max()) if x is not None and x.numel() else 0.0
