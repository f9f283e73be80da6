"""The tables of operators, a family a module; importing one enters its rules.

See :mod:`gpudist.sbp.registry` for the protocol.
"""

from gpudist.sbp.signatures import (
    comparisons,
    contractions,
    elementwise,
    factories,
    foreach,
    in_place,
    joining,
    matmul,
    reduce,
    reshape,
    slicing,
    transposes,
)

__all__ = [
    "comparisons",
    "contractions",
    "elementwise",
    "factories",
    "foreach",
    "in_place",
    "joining",
    "matmul",
    "reduce",
    "reshape",
    "slicing",
    "transposes",
]
