"""How long to wait before the next attempt."""

import random

__all__ = ["Backoff"]


class Backoff:
    """Delays that double up to a cap, with jitter so that a cohort does not come back in one instant."""

    def __init__(self, first_seconds: float = 0.1, cap_seconds: float = 15.0) -> None:
        self._first = first_seconds
        self._cap = cap_seconds
        self._next = first_seconds

    def delay(self) -> float:
        """Seconds to wait now: between half and the whole of the current step."""
        step, self._next = self._next, min(self._cap, 2 * self._next)
        return step * random.uniform(0.5, 1.0)  # noqa: S311  spreads load, protects nothing

    def reset(self) -> None:
        """The attempt was a success: the next failure starts small again."""
        self._next = self._first
