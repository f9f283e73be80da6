"""DistDL's names for who stores the parameters of a convolution."""

from __future__ import annotations

from typing import Any

import torch

from gpudist.compat.distdl.nn.adapter import Adapter


class ConvParameters(Adapter):
    """Properties of a convolution, in DistDL's names."""

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None
    P_x: Any

    @property
    def conv_layer(self) -> Any:
        """This layer: DistDL keeps ``weight`` and ``bias`` in a layer within."""
        return self

    @property
    def stores_weight(self) -> bool:
        """Whether this worker owns a block of the weight."""
        return self.weight.numel() > 0

    @property
    def stores_bias(self) -> bool:
        """Whether this worker owns a block of the bias."""
        return self.bias is not None and self.bias.numel() > 0
