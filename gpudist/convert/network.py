"""Run a network's own forward on global tensors."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from gpudist.cache import Cache
from gpudist.convert.copies import require_equal_copies
from gpudist.convert.given import Given
from gpudist.convert.inputs import Entrance, add_note, leaves_by_name, names_by_place
from gpudist.convert.kept import Kept, modules_in_call, names_of, paths_of
from gpudist.convert.parameters import Parameters
from gpudist.geometry.layout import broadcast, partial_sum
from gpudist.nn.parameters.replication import copies_of
from gpudist.sbp.copies import copy_of, require_copies
from gpudist.sbp.dispatch import refusal_of_transforms
from gpudist.sbp.done import done
from gpudist.sbp.functions import dispatch_functions
from gpudist.sbp.global_spec import GlobalSpec, spec_of, wrap_copies
from gpudist.sbp.global_tensor import GlobalTensor
from gpudist.sbp.interception import intercept
from gpudist.sbp.outer import OuterTensor
from gpudist.sbp.scope import Scope, current_scope, enter_scope, path_of_error, start_call
from gpudist.sbp.spectrum import compute_spectrum


class Conversion:
    """State of a converted network in addition to its modules.

    Attributes:
        P_x: partition of the inputs that are blocks.
        entrance: converts inputs to global tensors.
        scope: scope of the network's calls.
        outputs: specs of the global tensors that the last call returned.
        plan_text: the edits that the network follows, which ranks compare at the first call.
        expects_pins: whether the next call is to reach all pins.
    """

    def __init__(
        self,
        entrance: Entrance,
        unknown: Any,
        gather_limit_bytes: int | None,
        replicate_parameters: bool,
        local_buffers: Sequence[str] = (),
    ) -> None:
        # Before a function, such as reentrant checkpointing, whose forward calls the network.
        dispatch_functions()
        self.entrance = entrance
        self.P_x = entrance.P_x
        self.replicate_parameters = replicate_parameters
        self.settings = unknown, gather_limit_bytes
        self.scope = Scope(
            entrance.placement,
            tuple(entrance.axes),
            self.P_x.dim,
            unknown=unknown,
            gather_limit_bytes=gather_limit_bytes,
        )
        self.local_buffers = tuple(local_buffers)
        self.has_agreed = False
        self.outputs: Any = None
        self.plan_text = ""
        self.expects_pins = False
        self.parameters = Parameters(self.P_x)
        self.compared = Given(entrance, self.settings)
        # Specs of inputs that the scope has seen.
        self._specs = Cache[GlobalSpec, bool](1024)
        self._kept: Kept | None = None

    def __deepcopy__(self, memo: Any) -> Conversion:
        # Paths and substitutes refer to modules of the original.
        entrance = Entrance(self.P_x, self.entrance.inputs)
        conversion = Conversion(
            entrance, *self.settings, self.replicate_parameters, self.local_buffers
        )
        conversion.parameters = copy.deepcopy(self.parameters, memo)
        conversion.plan_text, conversion.scope.pins = self.plan_text, self.scope.pins
        conversion.expects_pins = self.expects_pins
        return conversion

    @property
    def has_blocks(self) -> bool:
        """Whether parameters are held in parts, or a plan changes modules."""
        return bool(self.plan_text) or not self.replicate_parameters

    def agree(self, network: torch.nn.Module) -> None:
        """Agree at the first call: on equal copies, and on the first rank's seed of random numbers.

        Under ``GPUDIST_CHECK=1``, workers compare their copies at every call.

        Raises:
            PlanMismatch: on every rank, if workers hold different parameters or buffers.
            ShapeError: within a transform of ``torch.func``, where nothing can be compared.
        """
        if not self.has_agreed:
            if torch._C._are_functorch_transforms_active():  # pyright: ignore
                raise refusal_of_transforms(f"the first call of a {type(network).__name__}")
            # A checkpoint may have given it.
            mine = self.scope.seed or int(torch.randint(1 << 62, ()).item())
            self.scope.seed = require_equal_copies(
                network, self.P_x, self.local_buffers, mine, self.plan_text
            )
            self.compared.name_network(network)
            self.has_agreed = True
        elif self.P_x.wire.compares_every_call and self.P_x.active:
            require_equal_copies(network, self.P_x, self.local_buffers, P_all=self.P_x)

    def __call__(
        self,
        network: torch.nn.Module,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call ``function``, a method of the network, on global tensors."""
        if current_scope() is not None:
            return function(*args, **kwargs)
        self.agree(network)
        kept = self._kept
        if kept is None or not kept.holds(network, kept.all_listed):
            kept = self._kept = Kept(network, self.parameters, self.scope)
            self.scope.paths, self.scope.name_of = paths_of(network), names_of(network)
        scope = start_call(self.scope)
        parts = self.compared.inputs(function, args, kwargs)
        with enter_scope(scope):
            args, kwargs = self.enter_arguments(function, args, kwargs)
        outer, done.parts = done.parts, parts
        try:
            with modules_in_call(network, kept, self.parameters, scope), intercept(scope):
                result = function(*args, **kwargs)
        # The user's network may raise any exception.
        except Exception as error:
            leaves = leaves_by_name(function, args, kwargs)
            add_note(error, [path_of_error(scope, error), *self.entrance.notes_of(leaves, error)])
            raise
        finally:
            done.parts = outer
        if parts is not None:
            self.compared.fold("functions", [*parts, b"%d draws" % scope.draws])
        with enter_scope(scope):
            left = self.leave_results(result)
        self.outputs = without_wait(left)
        if self.expects_pins:
            self.require_pins(scope)
        return left

    def forget(self) -> None:
        """Forget what calls have kept of the modules and of their parameters."""
        self._kept = None
        self.scope.substitutes, self.scope.originals = {}, {}

    def require_pins(self, scope: Scope) -> None:
        """Warn once, on the first worker, of layouts that no call has got."""
        self.expects_pins = False
        missed = [] if scope.pins is None else scope.pins.unreached(scope.calls)
        if missed and self.P_x.rank == 0:
            warnings.warn(f"plan: layouts that are not used: {'; '.join(missed)}", stacklevel=2)

    def enter_arguments(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        """Return the arguments of a method with blocks converted to global tensors."""
        names = names_by_place(function)
        holders, blocks = self.parameters.holders, 0
        wholes: list[tuple[str, torch.Tensor]] = []

        def enter(name: str, x: Any) -> Any:
            number = -1

            def enter_leaf(leaf: Any) -> Any:
                nonlocal blocks, number
                if not isinstance(leaf, torch.Tensor):
                    return leaf
                number += 1
                if self.entrance.is_held_by_all(name, leaf) and torch.is_grad_enabled():
                    (leaf,) = copies_of([leaf], [holders]) if leaf.requires_grad else (leaf,)
                leaf = self.entrance(name, leaf, number, is_first=not blocks)
                if isinstance(leaf, GlobalTensor):
                    blocks += 1
                    spec = spec_of(leaf)
                    if spec not in self._specs:
                        self._specs[spec] = True
                        self.scope.note_block(spec.layout, spec.dtype.itemsize)
                else:
                    wholes.append((name, leaf))
                return leaf

            return (
                enter_leaf(x)
                if isinstance(x, torch.Tensor)
                else tree_map(enter_leaf, x, is_leaf=_is_size)
            )

        entered = tuple(enter(names(i), x) for i, x in enumerate(args))
        others = {name: enter(name, x) for name, x in kwargs.items()}
        if wholes and not blocks:
            self.entrance.warn_unsplit(wholes, self.scope)
        return entered, others

    def leave_results(self, result: Any) -> Any:
        """Return the result with plain tensors converted to copies on every worker."""

        # A repeated call has a scope of its own.
        scope = current_scope() or self.scope

        def leave(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or dataclasses.is_dataclass(leaf):
                return leaf
            if isinstance(leaf, OuterTensor):
                leaf = leaf.materialize()
            leaf = copy_of(scope, leaf)
            require_copies(scope, "output", [leaf])
            if isinstance(leaf, GlobalTensor):
                return without_terms(compute_spectrum(leaf))
            return wrap_copies(GlobalTensor, leaf, self.entrance.placement)

        if isinstance(result, torch.Tensor):
            return leave(result)
        return tree_map(leave, result, is_leaf=_is_size)


def _is_size(x: Any) -> bool:
    # torch's tree_map converts it to a tuple.
    return isinstance(x, torch.Size)


def without_terms(x: GlobalTensor) -> GlobalTensor:
    """Sum the terms of ``x``, so that only blocks and copies remain."""
    if partial_sum not in x.sbp:
        return x
    return x.to_global(
        sbp=tuple(broadcast if attribute == partial_sum else attribute for attribute in x.sbp)
    )


def without_wait(outputs: Any) -> Any:
    """Return the specs of the outputs, nested alike, without references to tensors."""
    if isinstance(outputs, GlobalTensor):
        return spec_of(outputs)
    return tree_map(lambda y: spec_of(y) if isinstance(y, GlobalTensor) else None, outputs)
