"""Small jobs of every method, and data on which they learn."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from aggregator.strategies import strategy_for
from client_agent.trainers import Trainer, method_for
from client_agent.trainers.method import Stepwise
from veilfed.jobs import JobSpec, Strategy
from veilfed.wire.tensors import Arrays

__all__ = ["ANALYTIC", "CLASSES", "DIMENSION", "data", "first_model", "job", "stepwise", "strategy", "trainer"]

CLASSES = ["a", "b", "c"]
DIMENSION = 12
# The methods that train nothing by steps.
ANALYTIC = ("afl", "fedcgs", "fedopal")


def strategy(name: str, **changes: Any) -> Strategy:
    values: dict[str, Any] = {"name": name, "classes": CLASSES, "dimension": DIMENSION}
    if name == "fedopal":
        values["prompt_width"] = 8
    if name == "blindfed":
        values |= {"blocks": 3, "released": [1, 3], "tokens": 5, "rank": 4}
    if name not in ANALYTIC:
        values["batch_size"] = 16
    parsed: Strategy = TypeAdapter(Strategy).validate_python(values | changes)
    return parsed


def job(spec: Strategy, train: tuple[str, ...] = ("one", "two"), **changes: Any) -> JobSpec:
    if spec.masked_only:
        train = train if len(train) > 2 else (*train, "four")
        changes = {"secure_aggregation": {}} | changes
    return JobSpec.model_validate(
        {
            "name": "small",
            "strategy": spec.model_dump(),
            "cohort": {"train": list(train), "evaluate": ["three"]},
            "rounds": 1 if spec.name in ANALYTIC else 3,
            "quorum": len(train),
            **changes,
        }
    )


def data(samples: int = 50, seed: int = 0) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Three noisy directions: classes that a linear classifier can learn."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 3, samples)
    features = 2 * np.eye(DIMENSION, dtype=np.float32)[labels] + rng.normal(0, 0.5, (samples, DIMENSION))
    return features.astype(np.float32), labels


def first_model(spec: Strategy) -> Arrays:
    """Model 0, as the aggregator makes it."""
    return strategy_for(job(spec)).initial()


def trainer(spec: Strategy, seed: int = 50, institution: str = "one") -> Trainer:
    return Trainer(stepwise(spec), *data(), seed=seed, institution=institution)


def stepwise(spec: Strategy) -> Stepwise[Any]:
    """The method, of a job that is trained by steps."""
    method = method_for(spec)
    assert isinstance(method, Stepwise)
    return method
