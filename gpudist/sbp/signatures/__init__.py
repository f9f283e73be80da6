"""The tables of operators, a family a module; importing one enters its rules.

See :mod:`gpudist.sbp.registry` for the protocol.
"""

from gpudist.sbp.signatures import (
    activations,
    channel_norms,
    choosing,
    classes,
    comparisons,
    contractions,
    dropout,
    elementwise,
    factories,
    foreach,
    in_place,
    joining,
    losses,
    matmul,
    norms,
    pointwise,
    reduce,
    reshape,
    slicing,
    softmax,
    transposes,
    windows,
)

__all__ = [
    "activations",
    "channel_norms",
    "choosing",
    "classes",
    "comparisons",
    "contractions",
    "dropout",
    "elementwise",
    "factories",
    "foreach",
    "in_place",
    "joining",
    "losses",
    "matmul",
    "norms",
    "pointwise",
    "reduce",
    "reshape",
    "slicing",
    "softmax",
    "transposes",
    "windows",
]
