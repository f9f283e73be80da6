"""Convert any tree of torch modules into a distributed network, and back."""

from gpudist.convert.converted import Converted
from gpudist.convert.distribute import distribute
from gpudist.convert.dry_run import plan_of
from gpudist.convert.network_plan import NetworkPlan as Plan
from gpudist.convert.recorded import Compiled, compiled
from gpudist.convert.weights import sequential

__all__ = ["Compiled", "Converted", "Plan", "compiled", "distribute", "plan_of", "sequential"]
