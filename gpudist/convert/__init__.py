"""From any tree of torch modules to distributed layers, and back."""

from gpudist.convert.distribute import distribute, plan_of
from gpudist.convert.plan import Plan, Row
from gpudist.convert.weights import sequential

__all__ = ["Plan", "Row", "distribute", "plan_of", "sequential"]
