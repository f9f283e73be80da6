"""Parameters that every worker of a converted network holds whole, and layers called again."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F

from gpudist.nn.parameter_layer import ParameterLayer
from gpudist.nn.placement import Placement
from gpudist.partition import CartesianPartition, Partition


class SharedTensor(ParameterLayer):
    """A parameter or buffer of a user's module, which every worker has whole.

    The gradient of a parameter is summed over the workers. Others than those of ``P`` get a number,
    by which placeholders keep their shapes.

    Args:
        P: owns the tensor that it is combined with.
        P_all: the workers of the network, each of which holds the parameter.
        name, shape: of the tensor.
        is_parameter: rather than a buffer, which has no gradient.

    Attributes:
        owner: the module whose tensor it is. No child: the name of the parameter stays what it is.

    Cost:
        Backward, its part in the sum of all gradients.
    """

    def __init__(
        self,
        P: CartesianPartition,
        P_all: Partition,
        name: str,
        shape: Sequence[int],
        is_parameter: bool,
    ) -> None:
        super().__init__()
        self.P, self.name = P, name
        if is_parameter:
            self._replicate(True, {"weight": Placement.everywhere(shape, P_all)})

    @property
    def owner(self) -> torch.nn.Module:
        return self.__dict__["_owner"]

    def belong_to(self, owner: torch.nn.Module) -> None:
        self.__dict__["_owner"] = owner

    @property
    def weight(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return reduce(getattr, self.name.split("."), self.owner)

    def forward(self) -> torch.Tensor:
        (tensor,) = self.own_parameters()
        return tensor if self.P.active else tensor.sum()

    def extra_repr(self) -> str:
        return f"{self.name}, P={list(self.P.shape)}"


class DistributedPReLU(ParameterLayer):
    """Torch's PReLU on a tensor cut over ``P_x``, whose weight every worker holds whole.

    Args:
        P_x: owns the input and the output.
        P_all: the workers of the network, each of which holds the weight.
        layer: of torch, the same on every rank.

    Cost:
        Backward, its part in the sum of all gradients.
    """

    def __init__(self, P_x: CartesianPartition, P_all: Partition, layer: torch.nn.PReLU) -> None:
        super().__init__()
        self.P_x, self._P_all = P_x, P_all
        self.num_parameters = layer.num_parameters
        self.weight = torch.nn.Parameter(layer.weight.detach().clone().to(P_x.device))
        self._replicate(True, self._placements())

    def _placements(self) -> dict[str, Placement]:
        return {"weight": Placement.everywhere((self.num_parameters,), self._P_all)}

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        (weight,) = self.own_parameters()
        if not self.P_x.active:
            # As on other workers, the weight has a gradient.
            return input + weight.sum()
        return F.prelu(input, weight)

    def extra_repr(self) -> str:
        return f"num_parameters={self.num_parameters}, P_x={list(self.P_x.shape)}"


class FurtherCall(torch.nn.Module):
    """Another call of a layer, perhaps on a tensor of other extents.

    Agrees on the blocks of its input by itself. Weights, running statistics and mode are the
    layer's.

    Args:
        layer: is called elsewhere in the network.
        twin: a layer of the same arguments, whose own weights are dropped.
    """

    def __init__(self, layer: torch.nn.Module, twin: torch.nn.Module) -> None:
        super().__init__()
        # The same dicts: what takes another tensor's place in the layer does so here.
        twin._parameters, twin._buffers = layer._parameters, layer._buffers
        # No children, whose parameters would have two names.
        self.__dict__["_of"] = layer, twin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layer, twin = self.__dict__["_of"]
        twin.training = layer.training
        twin._copies = layer._copies
        return twin(x)

    def extra_repr(self) -> str:
        return f"of {type(self.__dict__['_of'][0]).__name__}"
