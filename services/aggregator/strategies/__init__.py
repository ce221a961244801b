"""Strategies: what to ask the institutions for, how to fold it, what to publish.

strategy_for(spec) -> Strategy
    .shapes, .model_bytes, .initial(class_vectors), .trains(institution, round), .check(update)
    .fold(updates, current), .fold_reported(updates, current)
"""

from aggregator.strategies.analytic import Afl, Fedcgs
from aggregator.strategies.averaging import AllGlobal, Averaging
from aggregator.strategies.base import Report, Strategy, Update
from aggregator.strategies.blindfed import Blindfed
from aggregator.strategies.fedclip import Fedclip
from aggregator.strategies.fedgh import Fedgh
from aggregator.strategies.fedopal import Fedopal
from aggregator.strategies.keeping import Keeping
from veilfed.errors import Code, VeilfedError
from veilfed.jobs import JobSpec, RidgeSpec, StrategyName

__all__ = ["STRATEGIES", "Report", "Strategy", "Update", "strategy_for", "with_ridge"]

STRATEGIES: dict[StrategyName, type[Strategy]] = {
    "fedot": Averaging,
    "all-global": AllGlobal,
    "all-local": Keeping,
    "fedlt": Averaging,
    "fedadapter": Averaging,
    "fedclip": Fedclip,
    "fedgh": Fedgh,
    "afl": Afl,
    "fedcgs": Fedcgs,
    "fedopal": Fedopal,
    "blindfed": Blindfed,
}


def strategy_for(spec: JobSpec) -> Strategy:
    """The strategy that a job names. Raises VeilfedError(JOB_INVALID) for a job that is too large for it."""
    return STRATEGIES[spec.strategy.name](spec)


def with_ridge(spec: JobSpec, ridge: str) -> Strategy:
    """The strategy of the job, solved with another ridge: "gcv" or a number. Raises VeilfedError(INPUT_INVALID)."""
    if not isinstance(spec.strategy, RidgeSpec):
        raise VeilfedError(Code.INPUT_INVALID, f"a job of {spec.strategy.name} has no ridge")
    try:
        values = spec.strategy.model_dump() | {"ridge": ridge if ridge == "gcv" else float(ridge)}
        strategy = type(spec.strategy).model_validate(values)
    except ValueError:
        raise VeilfedError(Code.INPUT_INVALID, "a ridge is gcv or a number from 0 to 1e12") from None
    if ridge == "gcv" and spec.privacy is not None:
        raise VeilfedError(Code.INPUT_INVALID, "with privacy ridge must be a number: gcv takes noise for samples")
    return strategy_for(spec.model_copy(update={"strategy": strategy}))
