"""One cell of a study: one job, in which one domain is held out, and what is measured of it."""

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from client_agent.trainers import Method, Stepwise, method_for
from veilfed.config import validate
from veilfed.errors import Code, VeilfedError
from veilfed.jobs import CLASSIFIER, TRANSFORM, JobSpec, OrthogonalSpec, StrategySpec
from veilfed.wire.tensors import digest, map_bytes
from veilfed_study import measures, simulation
from veilfed_study.methods import METHODS, MethodSettings
from veilfed_study.parts import Parts
from veilfed_study.subjects import Subject

__all__ = ["Cell", "digests", "freedom", "job_of", "measured", "shown_settings"]

# Keys of a strategy that settings do not choose.
FROM_DATA = ("name", "classes", "dimension")


@dataclass(frozen=True)
class Cell:
    """One job of a study."""

    method: str
    seed: int
    held_out: str

    @property
    def name(self) -> str:
        return f"{self.method}-{self.seed}-without-{self.held_out}"


def job_of(
    subject: Subject, method: str, settings: MethodSettings, seed: int, train: Sequence[str], evaluate: Sequence[str]
) -> JobSpec:
    """The job of a method. Raises VeilfedError(JOB_INVALID), which names the method and the key."""
    fixed = METHODS[method]
    for key in settings.strategy:
        if key in FROM_DATA or key in fixed.strategy:
            whence = "the data and the model" if key in FROM_DATA else "the method"
            raise VeilfedError(Code.JOB_INVALID, f"method {method}: strategy.{key} is not a setting: {whence} fix it")
    document = {
        "name": f"{subject.name}-{method}-{seed}"[:63].rstrip("-"),
        "strategy": {
            **fixed.defaults,
            **settings.strategy,
            "classes": list(subject.classes),
            "dimension": subject.dimension,
            **fixed.strategy,
        },
        "cohort": {"train": list(train), "evaluate": list(evaluate)},
        "rounds": settings.rounds if fixed.trains else 0,
        "quorum": len(train),
        "seed": seed,
    }
    return validate(
        JobSpec,
        json.dumps(document),
        f"method {method}",
        Code.JOB_INVALID,
        lines=False,
        hint="Correct the settings of the method.",
    )


def digests(subject: Subject, jobs: Iterable[JobSpec]) -> dict[bool, str]:
    """Of what these jobs read of a subject, by whether they take class vectors: not every subject has them."""
    return {vectors: subject.digest(vectors) for vectors in {job.strategy.takes_class_vectors for job in jobs}}


def shown_settings(job: JobSpec) -> dict[str, Any]:
    """Rounds and parameters that a job has, those left out that nothing in it uses."""
    strategy, method = job.strategy, method_for(job.strategy)
    trained = method.rates if job.rounds and isinstance(method, Stepwise) else {}
    idle = {
        *FROM_DATA,
        *(() if CLASSIFIER in trained else ("classifier_rate",)),
        *(() if TRANSFORM in trained else ("transform_rate", "blocks")),
    }
    return {"rounds": job.rounds, **strategy.model_dump(mode="json", exclude=idle)}


def freedom(method: Method[Any]) -> int:
    """Degrees of freedom of what an institution keeps: of X, those of its skew part (FEDOT, CVPR 2026, design 4)."""
    private = method.private_shapes
    numbers = {name: int(np.prod(shape)) for name, shape in private.items()}
    strategy: StrategySpec = method.strategy
    if isinstance(strategy, OrthogonalSpec) and "transform" in numbers:
        side = strategy.dimension // strategy.blocks
        numbers["transform"] = strategy.dimension * (side - 1) // 2
    return sum(numbers.values())


def measured(subject: Subject, spec: JobSpec, parts: Parts) -> dict[str, Any]:
    """Runs a job on the parts of its cohort; everything that is reported of it, as JSON.

    `accuracies` has for each round the fraction of right answers of each institution with the model and the state that
    the round starts from: with its own private tensors if it trains, with the model alone if not. `hits` has this for
    each test row at the end: 1 or 0.
    """
    started = time.monotonic()
    method = method_for(spec.strategy)
    vectors = subject.class_vectors() if spec.strategy.takes_class_vectors else None
    accuracies, conflicts = [], []
    sent, sent_numbers = 0, 0
    for snapshot in simulation.rounds(spec, parts, vectors):
        accuracies.append(measures.accuracies(method, snapshot.model, snapshot.states, parts))
        if snapshot.updates:
            conflicts.append(measures.conflict(snapshot.model, snapshot.updates))
            sent = max(sent, measures.longest(snapshot.updates))
            sent_numbers = measures.elements(next(iter(snapshot.updates.values())))
    model = map_bytes(snapshot.model)
    return {
        "settings": shown_settings(spec),
        "accuracies": accuracies,
        "hits": measures.hits(method, snapshot.model, snapshot.states, parts),
        "areas": measures.areas(method, snapshot.model, snapshot.states, parts),
        "conflict": conflicts,
        "condition_numbers": measures.condition_numbers(method, snapshot.model, snapshot.states),
        "numbers_sent": sent_numbers,
        "bytes_sent": sent,
        "bytes_received": len(model),
        "private_freedom": freedom(method),
        "model_sha256": digest(model),
        "seconds": round(time.monotonic() - started, 3),
    }
