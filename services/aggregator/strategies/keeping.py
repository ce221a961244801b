"""No aggregation: each institution keeps what it trains. The first model stays the job's model."""

from collections.abc import Callable, Iterable

from aggregator.strategies.base import Strategy
from veilfed.wire.tensors import Arrays

__all__ = ["Keeping"]


class Keeping(Strategy):
    """For `all-local`: updates have no tensors, and each round publishes the model that it started from."""

    def fold(self, updates: Iterable[tuple[float, Arrays]], current: Callable[[], Arrays]) -> Arrays:
        return current()
