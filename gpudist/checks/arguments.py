"""Arguments of public names, checked against the annotations of their signatures.

A wrong argument raises before anything else happens, and the error names the argument and the
expected values. Classes check arguments in their constructors, functions by :func:`checked`. Only
classes and functions of gpudist are checked, not subclasses by users. Annotations are resolved at
the first check. Nothing is checked while torch.compile traces.
"""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Callable, Callable as CallableABC, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, wraps
from numbers import Real
from operator import index
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, ParamSpec, TypeVar, Union, cast, get_args, get_origin

import numpy as np
from torch.compiler import is_dynamo_compiling

from gpudist.checks.storage import TORCH_ERRORS, explain, storage_refusal
from gpudist.errors import GpudistError, PartitionError, ShapeError

__all__ = [
    "CHECKS_ITSELF", "Checked", "as_plain", "check", "check_constructor", "checked", "describe",
    "is_shape", "refusal_of", "settle",
]  # fmt: skip

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
_Made = TypeVar("_Made")


@dataclass(frozen=True)
class _Admitted:
    """Set of values that an annotation allows.

    Attributes:
        admits: returns whether a value is allowed.
        text, plural: description of one value and of several values, for error messages.
        types: types of which all values are allowed, for a fast check.
        is_partition: whether the values are partitions.
    """

    admits: Callable[[Any], bool]
    text: str
    plural: str
    types: frozenset[type] = frozenset()
    is_partition: bool = False


class Checked:
    """Base of classes that check the arguments of their constructors."""

    # Checkers of types take the arguments from the constructor.
    def __new__(cls: type[_Made], *args: Any, **kwargs: Any) -> _Made:
        if not hasattr(cls.__init__, CHECKS_ITSELF):
            check_constructor(cls.__init__, cls.__name__, (None, *args), kwargs)
        return cast(Any, super()).__new__(cls)


# Attribute of a constructor that calls :func:`check_constructor` itself.
CHECKS_ITSELF = "_checks_itself"


def check_constructor(
    init: Callable[..., None], where: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Check the arguments of a constructor, as :func:`check` does, and reject unknown keywords.

    The error names the class under construction, even if it inherits ``init``.

    Raises:
        TypeError: ``init`` does not have this keyword.
    """
    if is_dynamo_compiling():
        return
    _, known = _parameters_of(init)
    for name in kwargs:
        if known and name not in known:
            text = f"{where}() got an unexpected keyword argument {name!r}"
            close = get_close_matches(name, known, 1)
            raise TypeError(f"{text}. Did you mean {close[0]!r}?" if close else text)
    check(init, where, args, kwargs)


def checked(
    error: type[GpudistError] = ShapeError,
    any_storage: bool = False,
) -> Callable[[Callable[_Parameters, _Result]], Callable[_Parameters, _Result]]:
    """Decorate a function to check its arguments at each call.

    Errors of torch are explained by :func:`gpudist.checks.storage.explain`.

    Args:
        error: type of the error for arguments other than partitions.
        any_storage: whether tensors without strided memory are left to the function.
    """

    def decorate(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
        name = function.__name__

        @wraps(function)
        def call(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
            if not is_dynamo_compiling():
                check(function, name, args, kwargs, error)
                refusal = storage_refusal(name, (*args, *kwargs.values()))
                if refusal is not None and not any_storage:
                    _refuse_for_all(refusal, (*args, *kwargs.values()))
            try:
                return function(*args, **kwargs)
            except TORCH_ERRORS as raised:
                explain(name, raised, (*args, *kwargs.values()))
                raise

        return call

    return decorate


def _refuse_for_all(refusal: GpudistError, arguments: Iterable[Any]) -> NoReturn:
    partitions = [P for P in arguments if hasattr(P, "create_partition_union")]
    for P in partitions:
        if any(P.ranks != other.ranks for other in partitions):
            P.wire.refuse(refusal)
        P.wire.reject(refusal, P.ranks)
    raise refusal


def check(
    function: Callable[..., Any],
    where: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    error: type[GpudistError] = ShapeError,
) -> None:
    """Raise if an argument does not match its annotation in ``function``.

    Missing, surplus and unknown arguments are left to Python.

    Args:
        function: function whose annotations are checked.
        where: name of the function in error messages.
        args, kwargs: arguments of the call; ``args`` of a method include ``self``.
        error: type of the error for arguments other than partitions.

    Raises:
        PartitionError: an argument should be a partition but is not.
    """
    refusal = refusal_of(function, where, args, kwargs, error)
    if refusal is not None:
        raise refusal


def refusal_of(
    function: Callable[..., Any],
    where: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    error: type[GpudistError] = ShapeError,
) -> GpudistError | None:
    """Return the error that :func:`check` would raise, or ``None``."""
    in_order, by_name = _parameters_of(function)
    for (name, kind), value in zip(in_order, args, strict=False):
        if type(value) not in kind.types and not kind.admits(value):
            return _refusal(where, name, value, kind, error)
    for name, value in kwargs.items():
        kind = by_name.get(name, _ANYTHING)
        if type(value) not in kind.types and not kind.admits(value):
            return _refusal(where, name, value, kind, error)
    return None


def _refusal(
    where: str, name: str, value: Any, kind: _Admitted, error: type[GpudistError]
) -> GpudistError:
    if kind.is_partition:
        error = PartitionError
        if hasattr(value, "create_cartesian_topology_partition") and not hasattr(
            value, "cartesian_index"
        ):
            return error(
                f"{where}: {value!r} has no Cartesian topology; create one with its method grid"
            )
    text = f"{where}: {name} is {describe(value)}; it takes {kind.text}"
    if kind.is_partition and hasattr(value, "mesh_dim_names"):
        text += "; create one with P_world.create_mesh_partition(mesh)"
    elif kind.is_partition and is_shape(value):
        text += f"; create one with P_world.grid({', '.join(map(str, value))})"
    if isinstance(value, np.ndarray) and "tensor" in kind.text:
        text += "; make one with torch.from_numpy"
    return error(text)


def is_shape(value: Any) -> bool:
    """Return whether ``value`` is a non-empty tuple or list of integers."""
    return isinstance(value, tuple | list) and bool(value) and all(map(_is_integer, value))


def settle(made: Any) -> None:
    """Check the fields of a dataclass and convert them to plain integers.

    Plain integers have the same ``repr`` on all ranks.
    """
    if is_dynamo_compiling():
        return
    fields = dict(vars(made))
    check(type(made).__init__, type(made).__name__, (None, *fields.values()), {})
    for name, value in fields.items():
        if type(value) not in (int, bool):
            plain = tuple(map(index, value)) if hasattr(value, "__len__") else index(value)
            object.__setattr__(made, name, plain)


def as_plain(value: Any) -> Any:
    """Convert nested lists and arrays of numbers to nested tuples, which are hashable."""
    if isinstance(value, np.ndarray):
        value = cast(Any, value).tolist()
    return tuple([as_plain(part) for part in value]) if _is_sequence(value) else value


@cache
def _parameters_of(
    function: Callable[..., Any],
) -> tuple[list[tuple[str, _Admitted]], dict[str, _Admitted]]:
    """Return the kinds of the parameters of a function, in order and by name."""
    plain = inspect.unwrap(function)
    if plain.__module__.partition(".")[0] != "gpudist":
        # A user's subclass may accept other arguments.
        return [], {}
    in_order: list[tuple[str, _Admitted]] = []
    by_name: dict[str, _Admitted] = {}
    parameters = inspect.signature(plain).parameters
    for parameter in parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        annotation = parameter.annotation
        if isinstance(annotation, str):
            try:
                annotation = eval(annotation, plain.__globals__)
            except NameError:
                # The annotation names a lazily imported library: the function checks itself.
                annotation = Any
        kind = _kind_of(annotation) if annotation is not parameter.empty else _ANYTHING
        if "root" in parameters and parameter.default is parameter.empty and kind.admits(None):
            # Only the root passes it: the function checks it, since all ranks must raise.
            kind = _ANYTHING
        by_name[parameter.name] = kind
        if parameter.kind is not parameter.KEYWORD_ONLY:
            in_order.append((parameter.name, kind))
    return in_order, by_name


def _kind_of(annotation: Any) -> _Admitted:
    """Return the kind of values that an annotation allows."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if isinstance(annotation, TypeVar):
        bounds = annotation.__constraints__ or (annotation.__bound__ or Any,)
        return _any_of([_kind_of(bound) for bound in bounds])
    if origin in (Union, UnionType):
        return _any_of([_kind_of(part) for part in parts])
    if origin is Literal:
        *others, last = map(repr, parts)
        text = f"{', '.join(others)} or {last}" if others else last
        # The function itself rejects other strings, with a more specific message.
        return _Admitted(lambda value: isinstance(value, str), text, text, frozenset([str]))
    if origin is tuple and parts[-1] is not Ellipsis:
        return _tuple_of([_kind_of(part) for part in parts])
    if origin in (tuple, list, Sequence):
        return _sequence_of(_kind_of(parts[0]))
    if origin in (Mapping, dict):
        return _Admitted(lambda value: isinstance(value, Mapping), "a dict", "dicts")
    if origin is CallableABC:
        return _Admitted(callable, "a function", "functions")
    if origin is Iterable:
        return _Admitted(
            lambda value: hasattr(type(value), "__iter__") or hasattr(type(value), "__getitem__"),
            "an iterable", "iterables",
        )  # fmt: skip
    return _of_class(origin if origin is not None else annotation)


def _any_of(kinds: Sequence[_Admitted]) -> _Admitted:
    return _Admitted(
        lambda value: any(kind.admits(value) for kind in kinds),
        " or ".join(dict.fromkeys(kind.text for kind in kinds)),
        " or ".join(dict.fromkeys(kind.plural for kind in kinds)),
        frozenset().union(*(kind.types for kind in kinds)),
        any(kind.is_partition for kind in kinds),
    )


def _tuple_of(kinds: Sequence[_Admitted]) -> _Admitted:
    def admits(value: Any) -> bool:
        return _is_sequence(value) and len(value) == len(kinds) and all(
            kind.admits(part) for kind, part in zip(kinds, value, strict=True)
        )  # fmt: skip

    if len(kinds) == 2 and kinds[0].plural == kinds[1].plural:
        of = kinds[0].plural
        return _Admitted(admits, f"a pair of {of}", f"pairs of {of}")
    text = ", ".join(kind.text for kind in kinds)
    return _Admitted(admits, f"a tuple of {text}", f"tuples of {text}")


def _sequence_of(kind: _Admitted) -> _Admitted:
    return _Admitted(
        lambda value: _is_sequence(value) and all(kind.admits(part) for part in value),
        f"a sequence of {kind.plural}",
        f"sequences of {kind.plural}",
        is_partition=kind.is_partition,
    )


def _of_class(annotation: Any) -> _Admitted:
    plain = _PLAIN.get(annotation)
    if plain is not None:
        return plain
    if not isinstance(annotation, type):
        return _ANYTHING
    name = annotation.__name__
    if annotation.__module__ == "torch":
        name = f"torch.{name}"
    if name == "torch.device":
        # Torch accepts a GPU index as well.
        return _Admitted(
            lambda value: isinstance(value, annotation) or _is_integer(value),
            name, "devices", frozenset([annotation]),
        )  # fmt: skip
    text = _TEXTS.get(name, f"{_article(name)} {name}")
    if getattr(annotation, "_is_protocol", False):
        wanted = [name for name in vars(annotation) if not name.startswith("_")]
        return _Admitted(
            lambda value: (
                not isinstance(value, type) and all(hasattr(value, name) for name in wanted)
            ),
            text, f"{name}s",
        )  # fmt: skip
    if text == "a tensor":
        # Also accept what torch's functions accept, such as tracing proxies.
        return _Admitted(
            lambda value: isinstance(value, annotation) or hasattr(value, "__torch_function__"),
            text, "tensors", frozenset([annotation]),
        )  # fmt: skip
    # Recognize partitions by a method: their room is above this one.
    is_partition = hasattr(annotation, "create_partition_union")
    return _Admitted(
        lambda value: isinstance(value, annotation),
        text, f"{text.partition(' ')[2]}s", frozenset([annotation]), is_partition,
    )  # fmt: skip


def _article(name: str) -> str:
    return "an" if name[0] in "AEIOU" else "a"


def _is_integer(value: Any) -> bool:
    if isinstance(value, bool | np.bool_) or getattr(value, "ndim", 0):
        return False
    try:
        index(value)
    except TypeError:
        return False
    return True


def _is_number(value: Any) -> bool:
    if isinstance(value, bool | np.bool_):
        return False
    if isinstance(value, Real) or _is_integer(value):
        return True
    return getattr(value, "ndim", None) == 0 and "float" in str(value.dtype)


def _is_sequence(value: Any) -> bool:
    """Return whether ``value`` is an ordered collection other than a string or a tensor."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return (
        all(hasattr(type(value), name) for name in ("__len__", "__iter__", "__getitem__"))
        and not isinstance(value, str | bytes | Mapping)
        and not hasattr(value, "__torch_function__")
    )


def describe(value: Any) -> str:
    """Describe a value in a few words, for error messages."""
    if value is None:
        return "None"
    of = type(value)
    if of in (bool, int, float, complex, str, bytes, list, tuple, dict, set):
        return f"{_short(value)} ({of.__name__})"
    name = of.__qualname__ if of.__module__ == "builtins" else f"{of.__module__}.{of.__qualname__}"
    shape = getattr(value, "shape", None)
    with_shape = f" of shape {list(shape)}" if isinstance(shape, tuple) else ""
    return f"{_article(name.upper())} {name}{with_shape}"


def _short(value: Any) -> str:
    shortener = reprlib.Repr()
    shortener.maxstring = shortener.maxother = 60
    shortener.maxlevel = 2
    return shortener.repr(value)


_TEXTS = {"torch.Tensor": "a tensor", "Module": "a module", "ndarray": "a NumPy array"}
_ANYTHING = _Admitted(lambda value: True, "anything", "anything")
_PLAIN = {
    Any: _ANYTHING,
    object: _ANYTHING,
    None: _Admitted(lambda value: value is None, "None", "None", frozenset([NoneType])),
    NoneType: _Admitted(lambda value: value is None, "None", "None", frozenset([NoneType])),
    bool: _Admitted(
        lambda value: (
            isinstance(value, bool | np.bool_) or (_is_integer(value) and index(value) in (0, 1))
        ),
        "True or False", "bools",
        frozenset([bool, np.bool_]),
    ),
    int: _Admitted(_is_integer, "an integer", "integers", frozenset([int])),
    float: _Admitted(_is_number, "a number", "numbers", frozenset([int, float])),
    str: _Admitted(lambda value: isinstance(value, str), "a string", "strings", frozenset([str])),
}  # fmt: skip
