"""Convert a network back to the sequential one."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from gpudist.checks.arguments import checked
from gpudist.convert.converted import conversion_of, undo_conversion
from gpudist.convert.parameters import named_tensors
from gpudist.errors import ConversionError
from gpudist.sbp.global_parameter import GlobalParameter
from gpudist.sbp.global_tensor import GlobalTensor
from gpudist.sbp.scope import Scope
from gpudist.sbp.unknown import gather

_Network = TypeVar("_Network", bound=torch.nn.Module)


@checked(ConversionError)
def sequential(distributed: _Network, root: int | None = None) -> _Network | None:
    """Return the sequential network with the current weights; inverse of :func:`distribute`.

    Collective over the partition passed to :func:`distribute`. The converted network stays as it
    is. As in ``copy.deepcopy``, closures keep referring to its tensors.

    Args:
        distributed: result of :func:`distribute`.
        root: rank, in that partition, of the worker that receives the network; by default, every
            worker does.

    Returns:
        New network of the original class, on the partition's device; ``None`` on workers that do
        not receive it.

    Cost:
        A copy, and an all-gather of the weights that the plan split.

    Raises:
        ConversionError: ``distributed`` is not the result of :func:`distribute`, or keeps an object
            that cannot be copied.
    """
    P_x, scope = conversion_of(distributed).P_x, conversion_of(distributed).scope
    if not P_x.active:
        return None
    memo: dict[int, Any] = {}
    if root not in (None, P_x.rank):
        # Global tensors in attributes are gathered, too, but nothing else is copied.
        tensors = [x for _, x in named_tensors(distributed)]
        memo = {id(x): x for x in tensors if not isinstance(x, GlobalTensor)}
    copied = undo_conversion(copy_network(distributed, memo, scope))
    return copied if root in (None, P_x.rank) else None


def copy_network(network: Any, memo: dict[int, Any], scope: Scope | None = None) -> Any:
    """Deep-copy a network, with copies of some tensors in ``memo``, by the identity of the tensor.

    Unlike torch, copies tensors that are not leaves, such as features of the last call: detached.
    With the ``scope`` of the network, global tensors that it keeps are gathered. Collective then.

    Raises:
        ConversionError: an object that the network keeps cannot be copied.
    """
    try:
        with _Detaching(scope):
            return copy.deepcopy(network, memo)
    except Exception as error:
        raise ConversionError(
            f"{type(network).__name__} cannot be deep-copied ({type(error).__name__}: {error}); "
            "delete the attribute, or give its class a __deepcopy__"
        ) from error


class _Detaching(TorchFunctionMode):
    def __init__(self, scope: Scope | None) -> None:
        super().__init__()
        self.scope = scope

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not torch.Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        x, memo = args
        whole = x if self.scope is None else gather(x, self.scope)
        if whole is x and x.is_leaf:
            return func(x, memo)
        copied = whole.detach().clone()
        memo[id(x)] = (
            torch.nn.Parameter(copied, x.requires_grad)
            if isinstance(x, GlobalParameter)
            else copied
        )
        return memo[id(x)]
