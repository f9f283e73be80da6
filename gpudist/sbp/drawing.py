"""Random numbers of plain tensors that are the same on every worker and in every layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from gpudist.sbp.registry import Composite, signatures
from gpudist.sbp.scope import Draws, current_draws

T = torch.Tensor
_INIT = torch.nn.init
# Functions that take a generator.
DRAWS = {
    torch.rand, torch.randn, torch.randint, torch.randperm, torch.bernoulli, torch.normal,
    torch.multinomial, T.bernoulli, T.multinomial, T.bernoulli_, T.normal_, T.uniform_,
    T.random_, T.exponential_, T.log_normal_, T.cauchy_, T.geometric_,
}  # fmt: skip
# Functions of a tensor whose numbers depend on the index of a cell, by their rules.
BY_INDEX = {
    torch.rand_like, torch.randn_like, torch.bernoulli, T.bernoulli, T.bernoulli_, T.normal_,
    T.uniform_, T.exponential_, F.rrelu, torch.rrelu, F.gumbel_softmax, F.dropout, F.dropout1d,
    F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout,
    torch.dropout_, torch.feature_dropout, torch.feature_dropout_, torch.alpha_dropout,
    torch.alpha_dropout_, torch.feature_alpha_dropout, torch.feature_alpha_dropout_,
}  # fmt: skip
# Position of the probability of dropping an attention weight.
_ATTENTION = {F.scaled_dot_product_attention: 4, F.multi_head_attention_forward: 10}
# Functions that draw from torch's default generator internally.
_COMPOSED = {
    torch.poisson, torch.randint_like, _INIT.normal_, _INIT.uniform_, _INIT.kaiming_uniform_,
}  # fmt: skip
# Recurrent networks, which draw if a probability is above 0 and they are in training.
_RECURRENT = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}


# Functions whose numbers depend on the order of the cells of a whole tensor.
WITHOUT_INDEX = (DRAWS - BY_INDEX) | _COMPOSED | _RECURRENT
# Functions that may draw.
DRAWING = DRAWS | BY_INDEX | WITHOUT_INDEX | {*_ATTENTION}


def may_draw(function: Any, args: Sequence[Any]) -> bool:
    """Return whether a function that can draw does so; a recurrent network may have no dropout."""
    return function not in _RECURRENT or any(isinstance(p, float) and p > 0 for p in args)


class Drawing(TorchFunctionMode):
    """Mode in which random numbers are the same on every worker, and for every layout."""

    def __init__(self, draws: Draws) -> None:
        super().__init__()
        self.draws = draws

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # A converted network that is called within has numbers of its own.
        is_own = current_draws() is self.draws
        return self.draw(func, args, kwargs) if is_own else func(*args, **kwargs)

    def draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of plain tensors."""
        if kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        p = _ATTENTION.get(func)
        if p is not None:
            p = kwargs.get("dropout_p", args[p] if len(args) > p else 0)
        if p or (func in BY_INDEX and "out" not in kwargs):
            rule = signatures[func]
            assert isinstance(rule, Composite)
            with self:
                return rule.function(*args, **kwargs)
        if func in DRAWS:
            return func(*args, **{**kwargs, "generator": self._generator(args, kwargs)})
        if func in WITHOUT_INDEX and may_draw(func, args):
            return self.call_whole(func, args, kwargs)
        return func(*args, **kwargs)

    def call_whole(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call a function with torch's generators at a state that all workers have."""
        with torch.random.fork_rng():
            torch.manual_seed(self.draws.number())
            return func(*args, **kwargs)

    def _generator(self, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Generator:
        device = kwargs.get("device") or next((x.device for x in args if isinstance(x, T)), "cpu")
        device = torch.device(device)
        generator = torch.Generator(device if device.type != "meta" else "cpu")
        return generator.manual_seed(self.draws.number())
