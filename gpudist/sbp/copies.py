"""In converted networks, pass copies of parameters to functions, however a forward reaches them.

Each call of a network makes copies of its parameters, whose gradients are summed over the workers
at the end of backward. Modules hold the copies during the call. A forward may also keep a parameter
in a dict, a list, an object or a closure. So every function that is given a parameter receives the
copy that stands for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from weakref import ref

import torch

from gpudist.errors import ConversionError
from gpudist.exchange.tracing import is_immediate, is_recorded
from gpudist.nn.parameters.gradient_graph import border_of, ends_search
from gpudist.nn.parameters.replication import copies_of
from gpudist.sbp.registry import name_of
from gpudist.sbp.scope import Scope, where_called
from gpudist.sbp.trees import map_tree

T = torch.Tensor
# Questions about a leaf of the graph, and changes of one.
_OF_LEAVES = {
    T.requires_grad_, T.register_hook, T.register_post_accumulate_grad_hook, T.retain_grad,
    *(getattr(T, name).__get__ for name in ("grad", "grad_fn", "is_leaf", "requires_grad")),
    *(getattr(T, name).__set__ for name in ("grad", "requires_grad")),
    T.grad.__delete__,  # pyright: ignore
}  # fmt: skip
# Maximum number of nodes visited in search of a parameter.
_MOST_NODES = 100


def is_new(scope: Scope, x: Any) -> bool:
    """Return whether ``x`` is a parameter that the network does not list, and has no copy yet."""
    return (
        scope.learns
        and issubclass(type(x), torch.nn.Parameter)
        and x.is_leaf
        and x.requires_grad
        and torch.is_grad_enabled()
    )


def copy_of(scope: Scope, x: Any) -> Any:
    """Return the tensor that stands for ``x`` in this call, or ``x``."""
    substitute = scope.substitutes.get(id(x))
    if substitute is None and is_new(scope, x):
        if is_recorded() and not is_immediate(x):
            raise ConversionError(
                f"{where_called(scope)}: compiled: a parameter of shape {list(x.shape)} is not "
                "among the network's parameters(), so the graph would not follow it; register it "
                "as an attribute of a module"
            )
        (substitute,) = copies_of([x], [scope.holders])
        # The reference prevents another tensor from having the identity.
        scope.substitutes[id(x)], scope.originals[id(substitute)] = substitute, x
    if substitute is None:
        note_leaf(scope, x)
    return x if substitute is None else substitute


def note_leaf(scope: Scope, x: Any) -> None:
    """Note a leaf that the forward made, whose gradient a backward within the forward sums."""
    if type(x) is T and x.requires_grad and x.is_leaf:
        scope.leaves[id(x)] = ref(x)


def needs_copies(scope: Scope, parts: Iterable[Any], is_global: bool) -> bool:
    """Return whether a copy may stand for a tensor in arguments; see :func:`with_copies`."""
    substitutes, learns = scope.substitutes, is_global and scope.learns
    for x in parts:
        if id(x) in substitutes:
            return True
        kind = type(x)
        if kind is list or kind is tuple:
            if needs_copies(scope, x, is_global):
                return True
        elif kind is dict:
            if needs_copies(scope, x.values(), is_global):
                return True
        elif learns and issubclass(kind, torch.nn.Parameter) and x.is_leaf and is_new(scope, x):
            return True
    return False


def with_copies(
    scope: Scope,
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_global: bool = True,
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments with copies in place of parameters, or ``None`` if there are none.

    Args:
        scope: scope of the network.
        function: function that is called.
        args, kwargs: its arguments.
        is_global: whether a global tensor is among them. Otherwise parameters that the network does
            not list get no copy: the forward may have made them, for a backward of its own.
    """
    if not needs_copies(scope, (*args, *kwargs.values()), is_global) or function in _OF_LEAVES:
        return None
    is_changed = False

    def substitute(x: Any) -> Any:
        nonlocal is_changed
        copy = copy_of(scope, x) if is_global or id(x) in scope.substitutes else x
        is_changed |= copy is not x
        return copy

    arguments = map_tree(args, substitute), map_tree(kwargs, substitute)
    return arguments if is_changed else None


def substitute_of(scope: Scope, function: Any, x: torch.Tensor) -> Any:
    """Return the tensor that stands for the plain ``x``, an argument of ``function``, or ``x``.

    Raises:
        ConversionError: ``x`` was computed from a parameter instead of from its copy.
    """
    if id(x) in scope.substitutes or (x.is_leaf and x.requires_grad):
        return copy_of(scope, x)
    require_copies(scope, function, (x,))
    return x


def require_copies(scope: Scope, function: Any, parts: Iterable[Any]) -> None:
    """Raise if a plain tensor was computed from a parameter instead of from its copy.

    Searches the first nodes of the graphs of tensors that are not themselves copies.

    Args:
        scope: scope of the network.
        function: function that is called, or its name.
        parts: its arguments.

    Raises:
        ConversionError: on every worker of the network; the message names the parameter.
    """
    for x in parts:
        kind = type(x)
        if kind is list or kind is tuple:
            require_copies(scope, function, x)
        if kind is not T or not scope.learns or not x.requires_grad:
            continue
        for leaf in leaves_of(x):
            note_leaf(scope, leaf)
            is_parameter = id(leaf) in scope.substitutes or isinstance(leaf, torch.nn.Parameter)
            if is_parameter and (not is_recorded() or is_immediate(x)):
                which = scope.name_of(leaf, scope.substitutes.get(id(leaf)))
                name = function if isinstance(function, str) else name_of(function)
                raise ConversionError(
                    f"{where_called(scope)}: {name}: a tensor of shape {list(x.shape)} was "
                    f"computed from the parameter {which} before this call of the network, or by "
                    "a function that torch does not dispatch (torch.func, torch.jit, a C++ "
                    "extension); the parameter would get this worker's part of the gradient only. "
                    "Compute the tensor in the forward, and pass such functions the attribute of "
                    "the module that has the parameter; or detach the tensor"
                )


def leaves_of(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the leaves that the first nodes of the graph of ``x`` lead to, or ``x``."""
    if x.grad_fn is None:
        yield x
        return
    nodes: list[Any] = [x.grad_fn]
    for node in nodes:
        if len(nodes) > _MOST_NODES:
            return
        # Nodes of torch's own functions have no such class. Others may be copies, or move global
        # tensors, whose graphs have blocks.
        if hasattr(node, "_forward_cls"):
            if ends_search(node) or border_of(node) is not None:
                continue
        elif hasattr(node, "variable"):
            yield node.variable
        for source, _ in node.next_functions:
            if source is not None and source not in nodes:
                nodes.append(source)
