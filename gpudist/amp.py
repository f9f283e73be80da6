"""Mixed precision: a gradient scaler that skips a step on all workers or on none."""

from __future__ import annotations

import torch

from gpudist.checks.arguments import Checked
from gpudist.errors import PartitionError
from gpudist.exchange import all_reduce
from gpudist.world.partition import Partition

__all__ = ["GradScaler"]


class GradScaler(Checked, torch.amp.GradScaler):
    """Gradient scaler of torch for parameters that are partitioned over workers.

    If a gradient is infinite or NaN on one worker, all workers skip the step and lower the scale.
    Workers without parameters, or with zero-volume ones, call the scaler too.

    Args:
        P: partition of the workers that train one network; each calls every method of the scaler.
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: see
            :class:`torch.amp.GradScaler`.

    Cost:
        One all-reduce of one number in each :meth:`unscale_`, or in :meth:`step` if
        :meth:`unscale_` was not called.

    Raises:
        PartitionError: this worker is not in ``P``.
    """

    def __init__(
        self,
        P: Partition,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        if not P.active:
            raise PartitionError(
                f"GradScaler: this worker is not a member of {P!r}; pass a partition that has it"
            )
        super().__init__(
            P.device.type, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        self._P = P

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        flags = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        has_infinite = torch.stack(
            [found_inf, *(flag.to(found_inf.device) for flag in flags.values())]
        ).max()
        return {found_inf.device: all_reduce(has_infinite.to(self._P.device), self._P, "max")}
