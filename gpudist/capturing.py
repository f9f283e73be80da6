"""A training step as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from gpudist.checks.arguments import checked
from gpudist.errors import GpudistError, ShapeError
from gpudist.sbp.call import key_of
from gpudist.sbp.done import done
from gpudist.sbp.global_parameter import block_of
from gpudist.sbp.global_tensor import GlobalTensor
from gpudist.sbp.scope import counts_of_draws, restore_draws
from gpudist.world import runtime
from gpudist.world.partition import Partition
from gpudist.world.texts import gather_texts

Arguments = ParamSpec("Arguments")
Y = TypeVar("Y")
_WARM_UP = 2


class _Recorder(Protocol):
    """Recorder of device work; a CUDA graph, or a stand-in in tests."""

    def run(self, call: Callable[[], Any]) -> Any:
        """Call eagerly on the stream of the capture."""
        ...

    def record(self, call: Callable[[], Any]) -> Any:
        """Record the work of a call, which is not carried out, and return its result."""
        ...

    def replay(self) -> None: ...

    def close(self) -> None: ...


class _CudaGraph:
    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self, call: Callable[[], Any]) -> Any:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = call()
        current.wait_stream(self._stream)
        return result

    def record(self, call: Callable[[], Any]) -> Any:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Threads that watch communicators ask for events meanwhile.
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            result = call()
        self._graph = graph
        return result

    def replay(self) -> None:
        assert self._graph is not None
        self._graph.replay()

    def close(self) -> None:
        if self._graph is not None:
            torch.cuda.synchronize()
            self._graph.reset()
            self._graph = None


class CapturedStep(Generic[Arguments, Y]):
    """Step that is replayed as a CUDA graph; see :func:`capture`.

    Attributes:
        step: the plain step, which may be called for inputs of other shapes.
        is_captured: whether further calls replay the graph.
    """

    def __init__(
        self, step: Callable[..., Y], P_world: Partition, graph: _Recorder | None, warm_up: int
    ) -> None:
        self.step = step
        self._P_world = P_world
        self._graph = graph
        self._left = warm_up
        self._spec: Any = None
        self._leaves: list[Any] = []
        self._result: Any = None
        self._numbers: list[tuple[torch.optim.Optimizer, list[dict[str, Any]]]] = []
        self.is_captured = False
        if graph is not None:
            P_world.wire.users.add(self)

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Y:
        """Carry out one step. Collective over the world.

        Raises:
            ShapeError: an input differs from that of the first call in shape, dtype, device or
                strides, or an argument that is not a tensor in its value.
            GpudistError: the step cannot be captured on some rank, a hyperparameter of an optimizer
                has changed since the capture, or the graph has been closed; or the world has
                failed, as operators raise it.
        """
        if self._graph is None:
            if self.is_captured:
                raise GpudistError(
                    "the captured step has been closed, by close() or the end of the world; "
                    "capture it again in a new world"
                )
            return self.step(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        if self._spec is None:
            device = self._P_world.device
            self._leaves = [_keep_input(leaf, i, device) for i, leaf in enumerate(leaves)]
            self._spec = spec
        else:
            self._take(leaves, spec)
        if self._left:
            self._left -= 1
            return self._graph.run(self._call)
        if not self.is_captured:
            self._capture(self._graph)
        self._require_same_numbers()
        self._P_world.wire.enqueue("captured step", self._graph.replay)
        return tree_map(_copy, self._result)

    def close(self) -> None:
        """Free the graph; further calls raise. The end of the world calls it too."""
        graph, self._graph = self._graph, None
        self._result, self._leaves, self._numbers = None, [], []
        if graph is not None:
            self.is_captured = True
            graph.close()

    def _call(self) -> Y:
        args, kwargs = tree_unflatten(self._leaves, self._spec)
        return self.step(*args, **kwargs)

    def _take(self, leaves: list[Any], spec: Any) -> None:
        if spec != self._spec:
            raise ShapeError(
                "a captured step gets the same arguments at every call; call its attribute step "
                "for others"
            )
        for i, (kept, leaf) in enumerate(zip(self._leaves, leaves, strict=True)):
            if not isinstance(kept, torch.Tensor):
                if key_of(kept) != _key_of_constant(i, leaf):
                    raise ShapeError(
                        f"argument {i} of a captured step is {leaf!r}, but was {kept!r} at the "
                        "first call, and a graph repeats that; pass a tensor"
                    )
            elif kept is not leaf:
                if _form(kept) != _form(leaf):
                    raise ShapeError(
                        f"argument {i} of a captured step is {_words(leaf)}, but was "
                        f"{_words(kept)} at the first call; call its attribute step for other "
                        "inputs, or capture a second step"
                    )
                kept.copy_(leaf)

    def _capture(self, graph: _Recorder) -> None:
        """Record the step on all ranks, or raise on all."""
        used: list[torch.optim.Optimizer] = []
        hook = register_optimizer_step_pre_hook(lambda optimizer, *_: used.append(optimizer))
        failure: Exception | None = None
        draws, generator = counts_of_draws(), torch.get_rng_state()
        done.is_off = True
        try:
            self._result = graph.record(self._call)
        except Exception as error:  # Raised below, on every rank.
            failure = error
        finally:
            done.is_off = False
            hook.remove()
        text = "" if failure is None else f"{type(failure).__name__}: {failure}"
        answers = gather_texts(self._P_world, text.encode(errors="backslashreplace")[:2048])
        if any(answers):
            # Ranks got differently far.
            restore_draws(draws)
            torch.set_rng_state(generator)
        for rank, answer in enumerate(answers):
            if answer:
                reason = answer.decode(errors="replace").strip()
                raise GpudistError(
                    f"the step cannot be captured: rank {rank}: {reason}\nIn a captured step, "
                    "nothing may wait for the GPU, as item(), tolist(), cpu(), print or an if on a "
                    "tensor do, and optimizers need capturable=True where they have it; move such "
                    "code out of the step"
                ) from failure
        self._numbers = [(optimizer, _hyperparameters_of(optimizer)) for optimizer in used]
        self.is_captured = True

    def _require_same_numbers(self) -> None:
        for optimizer, before in self._numbers:
            now = _hyperparameters_of(optimizer)
            if now != before:
                i, name = next(
                    (i, name)
                    for i, group in enumerate(now)
                    for name in group
                    if i >= len(before) or group[name] != before[i].get(name)
                )
                was = before[i].get(name) if i < len(before) else None
                raise GpudistError(
                    f"{name} of parameter group {i} of {type(optimizer).__name__} is "
                    f"{now[i][name]}, but the graph was captured with {was} and repeats it; make "
                    f"it a tensor on the GPU before the first step, as {name}=torch.tensor(...), "
                    "which schedulers change in place"
                )


@checked()
def capture(
    step: Callable[Arguments, Y], *, warm_up: int = _WARM_UP, P_world: Partition | None = None
) -> CapturedStep[Arguments, Y]:
    """Return a training step that replays one CUDA graph, with forward, backward and optimizer.

    Every call carries out one step. The first ``warm_up`` calls run eagerly; they make plans,
    communicators and the optimizer's state. The next call captures the step on all ranks, and it
    and all further calls copy their inputs and replay the graph. On a CPU, every call is the plain
    step. All ranks must call it alike, as every operator.

    Args:
        step: function of tensors and constants that returns tensors, such as the detached loss. It
            must use the same modules and optimizers at every call, in the same mode, and must not
            wait for the GPU.
        warm_up: number of eager calls, at least 1.
        P_world: world, by default the one of :func:`gpudist.init`.

    Returns:
        Callable with the arguments of ``step``. Its results are copies, which later calls do not
        overwrite.

    Cost:
        A copy of the inputs and of the results per call, and the launch of one graph. The graph
        keeps the memory of one step.

    Raises:
        GpudistError: ``warm_up`` is below 1. The first captured call raises, on every rank, why the
            step cannot be captured.

    Example:
        ::

            step = gpudist.capture(step)
            for x, target in batches:
                loss = step(x, target)
    """
    if warm_up < 1:
        raise GpudistError(f"warm_up is {warm_up}; at least one step runs before the capture")
    P_world = P_world if P_world is not None else runtime.init()
    graph = _CudaGraph() if P_world.device.type == "cuda" else None
    return CapturedStep(step, P_world, graph, warm_up)


def _keep_input(leaf: Any, number: int, device: torch.device) -> Any:
    if not isinstance(leaf, torch.Tensor):
        _key_of_constant(number, leaf)
        return leaf
    if leaf.device.type != device.type:
        raise ShapeError(
            f"argument {number} of a captured step is on {leaf.device}; move it to {device} before "
            "the call"
        )
    if leaf.requires_grad:
        raise ShapeError(
            f"argument {number} of a captured step requires gradients, which no graph returns to "
            "its caller; detach it"
        )
    return leaf.clone()


def _key_of_constant(number: int, leaf: Any) -> Any:
    try:
        return key_of(leaf)
    except TypeError as error:
        raise ShapeError(
            f"argument {number} of a captured step: {error}, and a graph repeats that of its "
            "capture; pass tensors, or such values"
        ) from None


def _copy(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, torch.Tensor) else x


def _form(x: Any) -> tuple[Any, ...]:
    if not isinstance(x, torch.Tensor):
        return (type(x),)
    if isinstance(x, GlobalTensor):
        return (*_form(x.to_local()), x.shape, x.placement, x.sbp)
    return x.dtype, x.shape, x.stride(), x.device


def _words(x: Any) -> str:
    if not isinstance(x, torch.Tensor):
        return f"a {type(x).__name__}"
    kind = f"global tensor {x.sbp}" if isinstance(x, GlobalTensor) else "tensor"
    strides = block_of(x).stride()
    return f"a {x.dtype} {kind} of shape {list(x.shape)} with strides {strides} on {x.device}"


def _hyperparameters_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    kinds = (bool, int, float, str, tuple, type(None))
    return [
        {name: value for name, value in group.items() if isinstance(value, kinds)}
        for group in optimizer.param_groups
    ]
