"""From any tree of torch modules to distributed layers, and back."""

from gpudist.convert.distribute import distribute
from gpudist.convert.plan import Plan, Row
from gpudist.convert.weights import sequential

__all__ = ["Plan", "Row", "distribute", "sequential"]
