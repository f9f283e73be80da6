"""Activation checkpoints of global tensors: forward runs again with the same random numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.utils.checkpoint

from gpudist.nn.autocast_on_meta import same_autocast
from gpudist.sbp.global_spec import GlobalSpec, wrap
from gpudist.sbp.global_tensor import GlobalTensor
from gpudist.sbp.interception import intercept
from gpudist.sbp.methods import entry
from gpudist.sbp.scope import Draws, Repeatable, Scope, current_draws, resume
from gpudist.sbp.spectrum import compute_spectrum
from gpudist.sbp.trees import tensors_in

_checkpoint: Any = torch.utils.checkpoint._checkpoint_without_reentrant_generator


@entry(_checkpoint)
def _checkpoint_global(fn: Any, *args: Any, **kwargs: Any) -> Any:
    draws = current_draws()
    if draws is None:
        return _checkpoint_plain(fn, *args, **kwargs)
    if isinstance(draws, Scope):
        # A parameter from a dict or a closure; its part alone would not be broadcast.
        args = tuple(draws.substitutes.get(id(x), x) for x in args)
    for x in tensors_in([args, kwargs]):
        # Else the first call alone would compute it.
        compute_spectrum(x)
    # Torch saves these tensors for backward, and only the parts carry the graph.
    specs = [x._global_spec if isinstance(x, GlobalTensor) else None for x in args]
    parts = [x._local if isinstance(x, GlobalTensor) else x for x in args]
    repeated = _checkpoint(_resume_draws(fn, draws, specs), *parts, **kwargs)
    return _note_checkpoint(draws, repeated) if isinstance(draws, Scope) else repeated


def _note_checkpoint(scope: Scope, checkpoint: Iterator[None]) -> Iterator[None]:
    outer, scope.checkpoint = scope.checkpoint, scope.checkpoint or checkpoint
    try:
        # The caller runs the function itself while the generator waits.
        yield from checkpoint
    finally:
        scope.checkpoint = outer


def _checkpoint_plain(fn: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
    again = Repeatable(fn)
    # The caller runs the function itself while the generator waits.
    with again.run():
        yield from _checkpoint(again, *args, **kwargs)


def _resume_draws(fn: Any, scope: Draws, specs: Sequence[GlobalSpec | None]) -> Any:
    draws = scope.draws
    calls = dict(scope.calls) if isinstance(scope, Scope) else None
    autocast = same_autocast()

    def run(*args: Any, **kwargs: Any) -> Any:
        specs_of_args = specs[len(specs) - len(args) :]
        tensors = [
            x if spec is None else wrap(GlobalTensor, x, spec)
            for x, spec in zip(args, specs_of_args, strict=True)
        ]
        if current_draws() is scope and scope.draws == draws:
            return fn(*tensors, **kwargs)
        with autocast(), intercept(resume(scope, draws, calls)):
            return fn(*tensors, **kwargs)

    return run
