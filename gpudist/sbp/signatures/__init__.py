"""The tables of operators, a family a module; importing one enters its rules.

See :mod:`gpudist.sbp.registry` for the protocol.
"""

from gpudist.sbp.signatures import elementwise, matmul, reduce

__all__ = ["elementwise", "matmul", "reduce"]
