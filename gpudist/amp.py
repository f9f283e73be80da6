"""Mixed precision: a gradient scaler whose workers skip a step together or take it together."""

from __future__ import annotations

import torch

from gpudist.checks.arguments import Checked
from gpudist.errors import PartitionError
from gpudist.exchange import all_reduce
from gpudist.world.partition import Partition


class GradScaler(Checked, torch.amp.GradScaler):
    """Torch's gradient scaler for parameters of which each worker holds other cells.

    A gradient that is infinite or no number on one worker is found by all of them: all skip the
    step and lower the scale. Workers without parameters, or with zero-size ones, call it too.

    Args:
        P: the workers that train one network; each calls every method of the scaler.
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: as torch's.

    Cost:
        One all-reduce of one number in each :meth:`unscale_`, or in :meth:`step` without it.

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
                f"GradScaler: this worker is not a member of {P!r}, with which it would skip steps"
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
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        own = torch.stack([found_inf, *(one.to(found_inf.device) for one in found.values())]).max()
        return {found_inf.device: all_reduce(own.to(self._P.device), self._P, "max")}
