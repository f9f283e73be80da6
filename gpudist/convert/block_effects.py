"""Effects of a block's forward, which happen once although checkpointing runs it again."""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd import grad_mode
from torch.utils._pytree import tree_map_only

from gpudist.errors import ConversionError
from gpudist.sbp.global_spec import local_of
from gpudist.sbp.global_tensor import GlobalTensor

# Attributes of every module that no forward changes.
_HOOKS = vars(nn.Module()).keys() - {"training", "_parameters", "_buffers", "_modules"}
_CONTAINERS = OrderedDict, dict, list, set, deque
# Objects of other libraries may refer to anything, such as a world.
_FOREIGN = sys.stdlib_module_names | {"torch", "numpy", "gpudist"}
# Smaller copies stay on a GPU, because comparing them would make the host wait.
_COMPARED_BYTES = 1 << 20


class RepeatedForward:
    """One call of a block's forward, which checkpointing runs again in backward.

    The repetition starts from the state of the first run, and leaves the state as it was: buffers
    and other tensors, attributes of the modules and of the user's objects in them, lists, dicts and
    sets, and the random numbers of Python and NumPy. Tensors that the forward changes are copied.
    Effects on anything else, such as global variables, happen twice.

    Raises:
        ConversionError: in the repetition, if a tensor that requires grad was changed in place
            since the first run began, or another tensor by something else than this forward.
    """

    def __init__(self, block: nn.Module, forward: Callable[..., Any]) -> None:
        self._block, self._forward = block, forward
        self._random: Any = None

    def __call__(self, keywords: list[str], *args: Any) -> Any:
        """Run the forward; the last of ``args`` are those of the keywords."""
        n = len(args) - len(keywords)
        with self._restored() if self._random else self._noted():
            return self._forward(*args[:n], **dict(zip(keywords, args[n:], strict=True)))

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Note the state, run the forward, and keep what it changes."""
        with torch._C.DisableTorchFunction():
            owners, tensors = _state_of(self._block)
            self._contents = [(owner, contents_of(owner)) for owner in owners]
            dense = [x for x in tensors if not x.requires_grad and x.layout is torch.strided]
            self._copies = [(x, x._version, x.clone()) for x in dense]
            named = [*self._block.named_parameters(), *self._block.named_buffers()]
            # Without its graph, a tensor has the same version.
            watched = {id(x): ("(an attribute)", x.detach(), x._version) for x in tensors}
            watched |= {id(x): (name, x, x._version) for name, x in named if not x.is_inference()}
        self._random = random.getstate(), np.random.get_state()
        yield
        with torch._C.DisableTorchFunction():
            self._copies = [copy for copy in self._copies if _may_differ(*copy)]
            copied = {id(x) for x, *_ in self._copies}
            self._versions = [each for key, each in watched.items() if key not in copied]
            changed = {id(owner) for owner, contents in self._contents if differ(owner, contents)}
            for i, (owner, contents) in enumerate(self._contents):
                now = {*map(id, contents_of(owner)), *changed}
                self._contents[i] = owner, tuple(_cut(x, now) for x in contents)

    @contextmanager
    def _restored(self) -> Iterator[None]:
        """Return to the state before the forward, and after the context to the present one."""
        changed = [name for name, x, version in self._versions if x._version != version]
        held = [x.untyped_storage() for x, *_ in self._copies if x.numel() and not x.is_meta]
        if changed or len({storage.data_ptr() for storage in held}) < len(held):
            raise ConversionError(
                f"{type(self._block).__name__} is recomputed in backward, but "
                + (f"its tensors {changed} were" if changed else "shared memory was")
                + " changed in place, by its forward or since: do not recompute it, or change them "
                "after backward"
            )
        copies = [copy.clone() for *_, copy in self._copies]
        with grad_mode._unsafe_preserve_version_counter(tuple(x for x, *_ in self._copies)):
            present = self._exchange(self._contents, copies, self._random)
            try:
                yield
            finally:
                self._exchange(*present)

    def _exchange(self, contents: Any, cells: list[torch.Tensor], numbers: Any) -> Any:
        """Set the contents of containers, cells of tensors and random numbers; return the old."""
        present = random.getstate(), np.random.get_state()
        before = [(owner, contents_of(owner)) for owner, _ in contents]
        with torch._C.DisableTorchFunction():
            own = [x.data for x, *_ in self._copies]
            for (x, *_), data in zip(self._copies, cells, strict=True):
                # What the repetition saves for backward must not change with x.
                x.data = data
        for owner, parts in contents:
            if differ(owner, parts):
                _refill(owner, parts)
        random.setstate(numbers[0])
        np.random.set_state(numbers[1])
        return before, own, present


def _state_of(block: nn.Module) -> tuple[list[Any], list[torch.Tensor]]:
    """Return the containers and the tensors that a forward of the block can reach."""
    owners: list[Any] = []
    tensors: list[torch.Tensor] = []
    left, seen = [block], set[int]()
    while left:
        x: Any = left.pop()
        if x is None or isinstance(x, (int, float, str)) or id(x) in seen:
            continue
        seen.add(id(x))
        if type(x) in (torch.Tensor, nn.Parameter) and not x.is_inference():
            tensors.append(x)
        if not isinstance(x, (*_CONTAINERS, tuple)):
            x = vars(x) if _has_state(x) else ()
        if not isinstance(x, tuple):
            owners.append(x)
        left += [y for key, y in x.items() if key not in _HOOKS] if isinstance(x, dict) else x
    return owners, tensors


def _has_state(x: Any) -> bool:
    if isinstance(x, GlobalTensor):
        return not local_of(x).requires_grad
    is_known = type(x).__module__.partition(".")[0] in _FOREIGN
    return isinstance(x, nn.Module) or (not is_known and type(getattr(x, "__dict__", 0)) is dict)


def contents_of(owner: Any) -> tuple[Any, ...]:
    """Return the items of a container: the keys and then the values of a dict."""
    return (*owner, *owner.values()) if isinstance(owner, dict) else tuple(owner)


def differ(owner: Any, contents: tuple[Any, ...]) -> bool:
    """Return whether a container has other objects than ``contents``, or in another order."""
    return [*map(id, contents_of(owner))] != [*map(id, contents)]


def _refill(owner: Any, contents: tuple[Any, ...]) -> None:
    # Subclasses may refuse to be changed.
    kind: Any = next(each for each in _CONTAINERS if isinstance(owner, each))
    refill: Any = kind.extend if kind in (list, deque) else kind.update  # pyright: ignore
    kind.clear(owner)  # pyright: ignore
    if isinstance(owner, dict):
        half = len(contents) // 2
        contents = tuple(zip(contents[:half], contents[half:], strict=True))
    refill(owner, contents)


def _may_differ(x: torch.Tensor, version: int, before: torch.Tensor) -> bool:
    # Writes through x.data do not change the version.
    may_wait = x.nbytes >= _COMPARED_BYTES and not torch.cuda.is_current_stream_capturing()
    is_known = x.is_meta or (x.is_cuda and not may_wait)
    return x._version != version or (x.is_cuda if is_known else not torch.equal(x, before))


def _cut(value: Any, kept: set[int]) -> Any:
    """Return a value without its graph, which would keep those of all earlier calls.

    Objects in ``kept``, given by their identity, stay as they are.
    """

    def cut(x: torch.Tensor) -> torch.Tensor:
        part = local_of(x)
        if part.grad_fn is None or id(x) in kept:
            return x
        part = part.detach().requires_grad_()
        return x.like(part) if isinstance(x, GlobalTensor) else part

    return tree_map_only(torch.Tensor, cut, value, is_leaf=lambda x: id(x) in kept)
