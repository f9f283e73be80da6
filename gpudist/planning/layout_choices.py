"""Layouts that the functions of a forward may have, and what each choice of them costs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

from torch import nn
from torch.utils._pytree import tree_leaves

from gpudist.geometry.layout import NdSbp
from gpudist.planning.elimination import Solutions, Table, solve
from gpudist.planning.forward_graph import ForwardGraph, Node, Returned, TensorInfo
from gpudist.planning.layout_costs import LayoutCosts, State, Work, layout_in, without_sizes
from gpudist.sbp.pins import Pin

# Costs of a choice: seconds, and bytes kept for backward.
Cost = tuple[float, int]
Choice = tuple[int, ...]


@dataclass(frozen=True)
class Variable:
    """Choice of a search: the state of a function, or the one its result is moved to.

    Attributes:
        node: number of the function.
        states: states to choose from; the first one is the grid's.
        is_result: whether it is the state of the result.
    """

    node: int
    states: tuple[State, ...]
    is_result: bool = False


class LayoutChoices:
    """The layouts that the functions of a forward may have, and what they cost.

    A function computes in a state, and the result may be moved before others take it, or by each
    of those that take it alone. Results that leave the network have the layout of the grid.

    Args:
        graph: functions of the forward.
        costs: their costs.
        left: results of the network.
        axes: axis of the input's grid that each axis of the placement is; along the first one,
            which splits the batch, tensors are not whole.

    Attributes:
        nodes: functions.
        states: all states.
        variables: what is chosen; the first ones are the states of the functions.
        uses: functions that take a result, each once, with the place among their tensors.
    """

    def __init__(
        self, graph: ForwardGraph, costs: LayoutCosts, left: Any, axes: Sequence[int]
    ) -> None:
        self.nodes, self.costs, self.graph, self.axes = graph.nodes, costs, graph, list(axes)
        self.home: State = (False,) * costs.placement.axes
        ways = [(False, True) if axis else (False,) for axis in axes or [0]]
        self.states = states = list(product(*ways))
        self.leaving = {
            origin
            for y in tree_leaves(left)
            if hasattr(y, "dtype") and (origin := graph.source_of(y)) is not None
        }
        self.uses: dict[Returned, dict[int, int]] = defaultdict(dict)
        for at, node in enumerate(self.nodes):
            for place, source in enumerate(node.sources):
                if source is not None:
                    self.uses[source].setdefault(at, place)
        self.variables = [
            Variable(at, tuple(self._states_of(node, states))) for at, node in enumerate(self.nodes)
        ]
        self.results: dict[int, int] = {}
        for at, node in enumerate(self.nodes):
            ways = len(self.uses.get(Returned(at, 0), ())) + (Returned(at, 0) in self.leaving)
            if self._gives_one(node) and ways > 1:
                distinct = tuple(self._states_with_distinct_layouts(node.outputs, states))
                self.results[at] = len(self.variables)
                self.variables.append(Variable(at, distinct, True))

    @cached_property
    def tables(self) -> list[tuple[Choice, dict[Choice, Cost]]]:
        """Costs of the values of a few variables each."""
        return [*self._functions(), *self._moves(), *self._ties()]

    @cached_property
    def _functions_by_path(self) -> Counter[str]:
        return Counter(node.path for node in self.nodes)

    @cached_property
    def sizes(self) -> list[int]:
        return [len(variable.states) for variable in self.variables]

    def solve(self, count: int, seconds_per_byte: float = 0.0) -> Solutions:
        """Return the fastest choices, if a byte kept for backward costs as much."""
        tables = [
            Table(
                variables,
                {key: s + seconds_per_byte * nbytes for key, (s, nbytes) in costs.items()},
            )
            for variables, costs in self.tables
        ]
        return solve(self.sizes, tables, count)

    def cost(self, choice: Choice) -> Cost | None:
        """Return what a choice costs; ``None`` if it is impossible."""
        seconds, nbytes = 0.0, 0
        for variables, costs in self.tables:
            cost = costs.get(tuple([choice[x] for x in variables]))
            if cost is None:
                return None
            seconds, nbytes = seconds + cost[0], nbytes + cost[1]
        return seconds, nbytes

    def value(self, number: int, state: State) -> int | None:
        """Return the value of a variable that stands for a state, ``None`` if it has none."""
        variable = self.variables[number]
        node = self.nodes[variable.node]
        tensors = node.outputs if variable.is_result else (*node.inputs, *node.outputs)
        wanted = _layouts(tensors, state)
        layouts = [_layouts(tensors, each) for each in variable.states]
        return layouts.index(wanted) if wanted in layouts else None

    def state(self, choice: Choice, at: int) -> State:
        """Return the state of a function."""
        return self.variables[at].states[choice[at]]

    def pins(self, choice: Choice, modules: Mapping[str, nn.Module]) -> list[Pin]:
        """Return the pins by which a network of these modules computes so."""
        pins: list[Pin] = []
        for at, node in enumerate(self.nodes):
            chosen = self.state(choice, at)
            taken = [
                (tensor, self._state_before(choice, at, source))
                for tensor, source in zip(node.inputs, node.sources, strict=True)
                if tensor.sbp is not None
            ]
            is_moved = any(
                _layouts([tensor], s) != _layouts([tensor], chosen) for tensor, s in taken
            )
            if is_moved and self._takes_alike(node):
                pins.append(self._pin(node, "input", taken[0][0], chosen, modules))
            if self._gives_one(node):
                after = self._state_after(choice, at)
                if _layouts(node.outputs, after) != _layouts(node.outputs, chosen):
                    pins.append(self._pin(node, "output", node.outputs[0], after, modules))
        return pins

    def entering_bytes(self, choice: Choice, functions: Sequence[int]) -> int:
        """Return the bytes of the moves to functions from others and from the network's inputs.

        A tensor that several of the functions take in one layout is moved once.
        """
        moves: dict[Any, int] = {}
        for at in functions:
            chosen = self.state(choice, at)
            for place, (tensor, source) in enumerate(
                zip(self.nodes[at].inputs, self.nodes[at].sources, strict=True)
            ):
                if tensor.sbp is None or (source is not None and source.node in functions):
                    continue
                before = self.home if source is None else self.state(choice, source.node)
                between = self._state_before(choice, at, source)
                for start, stop in ((before, between), (between, chosen)):
                    move = self.costs.move(tensor, start, stop)
                    key = source or (at, place), _layouts([tensor], start), _layouts([tensor], stop)
                    moves[key] = 0 if move is None else move.sent_bytes
        return sum(moves.values())

    def _state_before(self, choice: Choice, at: int, source: Returned | None) -> State:
        if source is None:
            return self.home
        if source.node in self.results:
            variable = self.results[source.node]
            return self.variables[variable].states[choice[variable]]
        return self.state(choice, source.node)

    def _state_after(self, choice: Choice, at: int) -> State:
        """Return the state to which a function's pin moves its result."""
        if at in self.results:
            variable = self.results[at]
            return self.variables[variable].states[choice[variable]]
        if Returned(at, 0) in self.leaving:
            return self.home
        chosen = self.state(choice, at)
        (user,) = self.uses.get(Returned(at, 0)) or (None,)
        if user is None or self._takes_alike(self.nodes[user]):
            return chosen
        return self.state(choice, user)

    def _pin(
        self,
        node: Node,
        at: Any,
        tensor: TensorInfo,
        state: State,
        modules: Mapping[str, nn.Module],
    ) -> Pin:
        """Return a pin of a function, or of the module if it is all that this calls."""
        sbp = without_sizes(layout_in(tensor.sbp or (), state))
        name, calls = node.name, self.graph.calls[node.path, node.name]
        module = modules[node.path]
        is_torchs = type(module).__module__.startswith("torch.nn.modules.")
        if is_torchs and not any(module.children()) and self._functions_by_path[node.path] == calls:
            name = ""
        call = node.call if calls > 1 else None
        return Pin(node.path, sbp, at, call, name, self.costs.placement.shape)

    @staticmethod
    def _gives_one(node: Node) -> bool:
        # A pin moves the first tensor in a result.
        return node.is_known and len(node.outputs) == 1 and not node.is_fixed

    @staticmethod
    def _takes_alike(node: Node) -> bool:
        # A pin prescribes one layout for all tensors.
        kinds = {
            (tensor.sbp, len(tensor.shape)) for tensor in node.inputs if tensor.sbp is not None
        }
        return node.is_known and len(kinds) == 1 and not node.is_fixed

    def _states_with_distinct_layouts(
        self, tensors: Sequence[TensorInfo], states: Sequence[State]
    ) -> list[State]:
        state_of: dict[tuple[NdSbp, ...], State] = {}
        for state in states:
            state_of.setdefault(_layouts(tensors, state), state)
        return list(state_of.values())

    def _states_of(self, node: Node, states: Sequence[State]) -> list[State]:
        if not node.is_known:
            return [self.home]
        distinct = self._states_with_distinct_layouts((*node.inputs, *node.outputs), states)
        return [s for s in distinct if s == self.home or self.costs.work(node, s) is not None]

    def _work(self, at: int, state: State) -> Work:
        node = self.nodes[at]
        work = self.costs.work(node, state) if node.is_known else None
        nothing = (False,) * max(len(node.inputs), len(node.outputs))
        # A function that cannot be called alone computes as on the grid.
        work = work or Work(0.0, 0.0, nothing, nothing)
        if node.checkpoint is None:
            return work
        # A checkpoint keeps what comes from outside of it.
        entered = [
            source is None or self.nodes[source.node].checkpoint is not node.checkpoint
            for source in node.sources
        ]
        return Work(self._seconds_with_repeats(work, at), 0.0, tuple(entered), nothing)

    def _seconds_with_repeats(self, work: Work, at: int | None) -> float:
        is_repeated = at is not None and self.nodes[at].checkpoint is not None
        return work.seconds + (work.forward_s if is_repeated else 0.0)

    def _is_kept_for_backward(self, result: Returned) -> bool:
        if self._work(result.node, self.home).keeps_outputs[result.place]:
            return True
        uses = self.uses.get(result, {})
        return any(self._work(at, self.home).keeps_inputs[place] for at, place in uses.items())

    def _functions(self) -> list[tuple[Choice, dict[Choice, Cost]]]:
        """Return the costs of the functions, and of sums of the gradients of their results."""
        tables: list[tuple[Choice, dict[Choice, Cost]]] = []
        for number, variable in enumerate(self.variables):
            at, node = variable.node, self.nodes[variable.node]
            costs: dict[Choice, Cost] = {}
            for value, state in enumerate(variable.states):
                if variable.is_result:
                    result = Returned(at, 0)
                    terms = len(self.uses.get(result, ())) + (result in self.leaving)
                    costs[value,] = self.costs.sum_s(node.outputs[0], state, terms), 0
                    continue
                work = self._work(at, state)
                costs[value,] = (
                    work.seconds,
                    work.kept_bytes
                    + sum(
                        self.costs.block_bytes(tensor, state)
                        for place, tensor in enumerate(node.outputs)
                        if self._is_kept_for_backward(Returned(at, place))
                    ),
                )
            tables.append(((number,), costs))
        return tables

    def _moves(self) -> list[tuple[Choice, dict[Choice, Cost]]]:
        """Return the costs of moves between functions."""
        tables: list[tuple[Choice, dict[Choice, Cost]]] = []
        for at, node in enumerate(self.nodes):
            if at in self.results:
                tables.append(self._between(at, self.results[at], node.outputs[0], at, None))
            for place, tensor in enumerate(node.outputs):
                result = Returned(at, place)
                source = self.results.get(at, at)
                mover = at if at not in self.results and self._gives_one(node) else None
                for user, where in self.uses.get(result, {}).items():
                    last = user if self._takes_alike(self.nodes[user]) else None
                    moved_at = mover if last is None else last
                    tables.append(self._between(source, user, tensor, moved_at, where))
                if result in self.leaving:
                    tables.append(self._between(source, None, tensor, mover, None))
            if node.is_known:
                for place, (tensor, source) in enumerate(
                    zip(node.inputs, node.sources, strict=True)
                ):
                    if source is None and tensor.sbp is not None:
                        mover = at if self._takes_alike(node) else None
                        tables.append(self._between(None, at, tensor, mover, place))
        return tables

    def _between(
        self, source: int | None, target: int | None, tensor: TensorInfo, mover: int | None,
        place: int | None,
    ) -> tuple[Choice, dict[Choice, Cost]]:  # fmt: skip
        """Return the costs of a tensor's way from one variable to another, or to the grid's state.

        Args:
            source, target: variables; ``None`` for the state of the grid.
            tensor: the tensor.
            mover: function whose pin can move it; ``None`` if no pin can.
            place: place among the tensors that the target takes; ``None`` for the network's output.
        """
        ends = [(self.home,) if x is None else self.variables[x].states for x in (source, target)]
        is_kept = False
        # A checkpoint moves again what it has kept.
        is_inside = mover == target and target is not None and self.nodes[target].checkpoint
        if place is not None and target is not None and not is_inside:
            is_kept = self._work(target, self.home).keeps_inputs[place]
        costs: dict[Choice, Cost] = {}
        for (a, before), (b, after) in product(*map(enumerate, ends)):
            move = self.costs.move(tensor, before, after)
            is_moved = _layouts([tensor], before) != _layouts([tensor], after)
            if move is None or (is_moved and mover is None):
                continue
            seconds = self._seconds_with_repeats(move, mover)
            size_bytes = self.costs.block_bytes(tensor, after) if is_moved and is_kept else 0
            key = tuple(v for x, v in ((source, a), (target, b)) if x is not None)
            costs[key] = seconds, size_bytes
        return tuple(x for x in (source, target) if x is not None), costs

    def _ties(self) -> list[tuple[Choice, dict[Choice, Cost]]]:
        pairs = [(self.variables[a].states, self.variables[b].states) for a, b in self.graph.tied]
        return [
            (tied, {(a.index(state), b.index(state)): (0.0, 0) for state in a if state in b})
            for tied, (a, b) in zip(self.graph.tied, pairs, strict=True)
            if min(len(a), len(b)) > 1
        ]


def _layouts(tensors: Sequence[TensorInfo], state: State) -> tuple[NdSbp, ...]:
    return tuple(layout_in(tensor.sbp, state) for tensor in tensors if tensor.sbp is not None)
