"""Strategies: what to ask the institutions for, how to fold it, what to publish. One class for each method's way.

strategy_for(spec) -> Strategy
    .shapes, .model_bytes, .initial(class_vectors), .trains(institution, round), .fold(updates, current)
"""

from aggregator.strategies.averaging import Averaging
from aggregator.strategies.base import Strategy
from aggregator.strategies.keeping import Keeping
from veilfed.jobs import JobSpec, StrategyName

__all__ = ["STRATEGIES", "Averaging", "Strategy", "strategy_for"]

STRATEGIES: dict[StrategyName, type[Strategy]] = {
    "fedot": Averaging,
    "all-local": Keeping,
}


def strategy_for(spec: JobSpec) -> Strategy:
    """The strategy that a job names."""
    return STRATEGIES[spec.strategy.name](spec)
