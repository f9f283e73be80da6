"""Interpolation with DistDL's arguments."""

from __future__ import annotations

from collections.abc import Sequence

from gpudist import nn
from gpudist.compat.distdl.backends.mpi.buffer import MPIBufferManager
from gpudist.compat.distdl.backends.mpi.partition import MPICartesianPartition
from gpudist.errors import ShapeError

# Torch's name of the linear mode, by the number of dims.
_LINEAR = {3: "linear", 4: "bilinear", 5: "trilinear"}


class DistributedUpsample(nn.DistributedUpsample):
    """Interpolation of a tensor split over ``P_x``; see :class:`gpudist.nn.DistributedUpsample`.

    The input's blocks may change at every call.

    Args:
        P_x: partition of input and output.
        buffer_manager: ignored.
        size: global shape of the output, with batch and channels.
        scale_factor: factor of the spatial dims.
        mode: ``"linear"``, in any number of dims, or ``"nearest"``.
        align_corners: see torch's layer; ignored by ``"nearest"``.

    Raises:
        ShapeError: the mode is another one, or not one of ``size`` and ``scale_factor`` is given.
    """

    def __init__(
        self,
        P_x: MPICartesianPartition,
        buffer_manager: MPIBufferManager | None = None,
        size: Sequence[int] | None = None,
        scale_factor: float | Sequence[float] | None = None,
        mode: str = "linear",
        align_corners: bool = False,
    ) -> None:
        torchs_mode = torchs_mode_of(type(self).__name__, mode, P_x.dim)
        if size is not None and len(size) != P_x.dim:
            raise ShapeError(
                f"{type(self).__name__}: size has {len(size)} entries but P_x has {P_x.dim} axes; "
                "give the shape of the whole output, with batch and channels"
            )
        super().__init__(
            P_x.partition, None if size is None else list(size[2:]), scale_factor, torchs_mode,
            None if mode == "nearest" else align_corners, shape="dynamic",
        )  # fmt: skip


def torchs_mode_of(name: str, mode: str, dims: int) -> str:
    """Return torch's name for DistDL's ``mode`` of a tensor with ``dims`` dims.

    Raises:
        ShapeError: DistDL does not have this mode.
    """
    if mode not in ("linear", "nearest"):
        raise ShapeError(
            f"{name}: mode is {mode!r}; it must be 'linear' or 'nearest'; "
            "gpudist.nn.DistributedUpsample has all modes of torch"
        )
    return _LINEAR.get(dims, mode) if mode == "linear" else mode
