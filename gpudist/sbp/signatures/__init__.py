"""The tables of operators, a family a module; importing one enters its rules.

See :mod:`gpudist.sbp.registry` for the protocol.
"""

from gpudist.sbp.signatures import (
    elementwise,
    factories,
    foreach,
    in_place,
    joining,
    matmul,
    reduce,
    reshape,
    transposes,
)

__all__ = [
    "elementwise",
    "factories",
    "foreach",
    "in_place",
    "joining",
    "matmul",
    "reduce",
    "reshape",
    "transposes",
]
