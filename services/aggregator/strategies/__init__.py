"""Strategies: what to ask the institutions for, how to fold it, what to publish."""

from aggregator.strategies.fedot import Fedot
from veilfed.jobs import JobSpec

__all__ = ["Fedot", "strategy_for"]


def strategy_for(spec: JobSpec) -> Fedot:
    """The strategy that a job names."""
    return Fedot(spec)
