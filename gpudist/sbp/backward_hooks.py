"""Full backward hooks of modules that are called with global tensors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from gpudist.sbp.global_tensor import GlobalTensor
from gpudist.sbp.methods import GradientLayout, entry
from gpudist.sbp.scope import current_scope
from gpudist.sbp.trees import map_tree
from gpudist.sbp.whole_functions import as_global_copies, plain_gradients_are_terms

_Layouts = Sequence[Any]


@entry(torch.utils.hooks.BackwardHook)
class _BackwardHook(torch.utils.hooks.BackwardHook):
    """Adapter that calls the full backward hooks of a module with global gradients."""

    def __init__(self, module: Any, hooks: Any, pre_hooks: Any) -> None:
        self.given: _Layouts = ()
        self.results: _Layouts = ()
        super().__init__(
            module, [self._around(hook) for hook in hooks], [self._before(h) for h in pre_hooks]
        )

    def setup_input_hook(self, args: Any) -> Any:
        args, self.given = _copies_and_layouts(self.module, args)
        return super().setup_input_hook(args)

    def setup_output_hook(self, args: Any) -> Any:
        args, self.results = _copies_and_layouts(self.module, args)
        return super().setup_output_hook(args)

    def _around(self, hook: Any) -> Any:
        def call(module: Any, of_given: Any, of_results: Any) -> Any:
            wanted = _global_gradients(of_results, self.results)
            result = hook(module, _global_gradients(of_given, self.given), wanted)
            return _local_gradients(result, self.given)

        return call

    def _before(self, hook: Any) -> Any:
        def call(module: Any, of_results: Any) -> Any:
            result = hook(module, _global_gradients(of_results, self.results))
            return _local_gradients(result, self.results)

        return call


def _copies_and_layouts(module: torch.nn.Module, args: Any) -> tuple[Any, _Layouts]:
    scope = current_scope()
    if scope is not None and plain_gradients_are_terms(scope):
        name = f"backward hook of {type(module).__name__}"
        args = map_tree(args, partial(as_global_copies, scope, name))
    tensors = args if isinstance(args, (tuple, list)) else (args,)
    return args, [GradientLayout(x) if isinstance(x, GlobalTensor) else None for x in tensors]


def _global_gradients(gradients: Any, layouts: _Layouts) -> Any:
    return tuple(
        g if layout is None or g is None else layout.wrap(g)
        for layout, g in zip(layouts, gradients, strict=True)
    )


def _local_gradients(gradients: Any, layouts: _Layouts) -> Any:
    """Return the parts of the gradients that a hook returned, in the original layout."""
    if gradients is None:
        return None
    gradients = gradients if isinstance(gradients, tuple) else (gradients,)
    return tuple(
        layout.part_of(g) if isinstance(g, GlobalTensor) else g
        for layout, g in zip(layouts, gradients, strict=True)
    )
