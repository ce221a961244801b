"""Strategies: what to ask the institutions for, how to fold it, what to publish.

strategy_for(spec) -> Strategy
    .shapes, .model_bytes, .initial(class_vectors), .trains(institution, round), .fold(updates, current)
"""

from aggregator.strategies.averaging import AllGlobal, Averaging
from aggregator.strategies.base import Strategy
from aggregator.strategies.fedclip import Fedclip
from aggregator.strategies.fedgh import Fedgh
from aggregator.strategies.keeping import Keeping
from veilfed.jobs import JobSpec, StrategyName

__all__ = ["STRATEGIES", "Strategy", "strategy_for"]

STRATEGIES: dict[StrategyName, type[Strategy]] = {
    "fedot": Averaging,
    "all-global": AllGlobal,
    "all-local": Keeping,
    "fedlt": Averaging,
    "fedadapter": Averaging,
    "fedclip": Fedclip,
    "fedgh": Fedgh,
}


def strategy_for(spec: JobSpec) -> Strategy:
    """The strategy that a job names. Raises VeilfedError(JOB_INVALID) for a job that is too large for it."""
    return STRATEGIES[spec.strategy.name](spec)
