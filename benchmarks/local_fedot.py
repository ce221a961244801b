"""FEDOT in one process: the agents' trainer and the aggregator's fold, without services between them.

The reference for what the services compute: the same job on the same embeddings gives the same model, bit for bit.

    run_job(spec, parts, marks) -> Run          one job of one strategy
    leave_one_out(task, parts, seed, transform, marks) -> {round: matrix [N, N]}
    load_domains(task, packages, cache) -> {institution: Domain}      real data, embedded by the oracle's model
"""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from aggregator.strategies import strategy_for
from client_agent.data.config import DataConfig
from client_agent.data.source import Samples, class_indices, load, split
from client_agent.trainers import Method, State, Trainer, method_for
from fm_oracle.models import registry
from veilfed.demo.study import Cell, Transform, job_spec
from veilfed.demo.tasks import Task
from veilfed.files import write_atomic
from veilfed.jobs import JobSpec
from veilfed.wire.tensors import Arrays

__all__ = ["Domain", "Part", "Run", "Settings", "leave_one_out", "load_domains", "run_job", "study_parts"]

TEST_FRACTION = 0.4  # the agents' default


@dataclass(frozen=True)
class Domain:
    """One institution's whole data: `features` [n, d] as the model gives them, `labels` int64 [n]."""

    samples: Samples
    features: NDArray[np.float32]
    labels: NDArray[np.int64]


@dataclass(frozen=True)
class Part:
    """Rows of a domain to train on, and rows to evaluate on."""

    domain: Domain
    train: NDArray[np.intp]
    held: NDArray[np.intp]

    @property
    def training(self) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        return self.domain.features[self.train], self.domain.labels[self.train]

    @property
    def evaluation(self) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        return self.domain.features[self.held], self.domain.labels[self.held]


@dataclass(frozen=True)
class Settings:
    """What may be chosen: Adam's rate of w_g and of X, and r."""

    classifier_rate: float
    transform_rate: float
    blocks: int

    def of(self, task: Task) -> Task:
        return replace(
            task, classifier_rate=self.classifier_rate, transform_rate=self.transform_rate, blocks=self.blocks
        )


@dataclass(frozen=True)
class Run:
    """A finished job. `accuracies`: number of training rounds -> institution -> fraction, at the marks only.

    An institution that trains evaluates with its private state, the others with the model alone.
    """

    accuracies: dict[int, dict[str, float]]
    model: Arrays
    states: dict[str, State]


def run_job(spec: JobSpec, parts: Mapping[str, Part], marks: Collection[int]) -> Run:
    """All rounds of a job; accuracies of the models after `marks` rounds."""
    strategy, method = strategy_for(spec), method_for(spec.strategy)
    model = strategy.initial()
    trainers = {
        name: Trainer(method, *parts[name].training, seed=spec.seed, institution=name) for name in spec.cohort.train
    }
    states = {name: trainer.initial_state(model) for name, trainer in trainers.items()}
    accuracies = {}
    for number in range(spec.rounds + 1):
        if number in marks:
            accuracies[number] = _accuracies(method, model, states, parts)
        if number == spec.rounds:
            break
        updates: list[tuple[float, Arrays]] = []
        for name, trainer in trainers.items():
            update, states[name] = trainer.train(model, states[name], number)
            updates.append((method.update_weight(len(parts[name].train)), update))
        model = strategy.fold(updates, partial(dict, model))
    return Run(accuracies, model, states)


def _accuracies(
    method: Method[Any], model: Arrays, states: Mapping[str, State], parts: Mapping[str, Part]
) -> dict[str, float]:
    found = {}
    for name, part in parts.items():
        correct, total = method.evaluate(model, states.get(name), *part.evaluation)
        found[name] = correct / total
    return found


def leave_one_out(
    task: Task, parts: Mapping[str, Part], seed: int, transform: Transform, marks: Collection[int]
) -> dict[int, NDArray[np.float64]]:
    """Number of rounds -> M [N, N]: i is held out, j evaluates, in the order of the task's domains."""
    rows: dict[int, list[list[float]]] = {mark: [] for mark in sorted(marks)}
    for held_out in task.domains:
        run = run_job(job_spec(task, Cell(held_out, seed, transform), max(marks)), parts, marks)
        for mark, row in rows.items():
            row.append([run.accuracies[mark][name] for name in task.domains])
    return {mark: np.array(row) for mark, row in rows.items()}


def study_parts(task: Task, domains: Mapping[str, Domain], seed: int) -> dict[str, Part]:
    """Training and test split of each institution, as its agent draws them for a job with this seed."""
    return {
        name: Part(domain, *split(domain.samples, task.classes, TEST_FRACTION, seed))
        for name, domain in domains.items()
    }


def load_domains(task: Task, packages: Path, cache: Path) -> dict[str, Domain]:
    """The data of all institutions of a task, embedded once and then kept in the folder `cache`."""
    adapter: TypeAdapter[Any] = TypeAdapter(DataConfig)
    domains = {}
    model = registry.load(task.model, packages)
    for name, section in task.domains.items():
        samples = load(adapter.validate_python(section))
        key = hashlib.sha256(f"{model.card.version}:{_digest(samples)}".encode()).hexdigest()
        path = cache / f"{task.name}-{name}-{key[:16]}.f32"
        if not path.exists():
            cache.mkdir(parents=True, exist_ok=True)
            write_atomic(path, model.embed(samples.inputs).tobytes())
        features = np.frombuffer(path.read_bytes(), np.float32).reshape(len(samples.inputs), -1)
        domains[name] = Domain(samples, features, class_indices(samples.labels, task.classes))
    return domains


def _digest(samples: Samples) -> str:
    sums = [hashlib.sha256(x if isinstance(x, bytes) else x.encode()).hexdigest() for x in samples.inputs]
    return hashlib.sha256("".join(sums).encode()).hexdigest()
