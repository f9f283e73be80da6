"""From any tree of torch modules to distributed layers, and back."""

from gpudist.convert.distribute import distribute
from gpudist.convert.dry import plan_of
from gpudist.convert.plan import Plan
from gpudist.convert.recorded import Compiled, compiled
from gpudist.convert.weights import sequential

__all__ = ["Compiled", "Plan", "compiled", "distribute", "plan_of", "sequential"]
