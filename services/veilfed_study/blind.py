"""BlindFed's adapters on block outputs of students, divided among clients; with and without sampling of blocks.

The training rows are one client's (`centralised`), or are divided with class shares from Dirichlet(alpha). Accuracy is
that of the last model on the test rows. The seed draws split, division, first values, batches and blocks.

    adapters on     fixed: blocks drawn once, as a job has them; round: drawn again in each round, as in the paper;
                    all: every block, which no oracle releases
    probes          a linear classifier on one vector for each example: AFL's, which is the same for every division of
                    the rows, and one that is averaged in as many rounds as the adapters
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from aggregator.strategies import strategy_for
from client_agent.data.source import split
from client_agent.trainers import Trains, method_for, trainer_for
from fm_oracle.blocks.release import fixed
from veilfed.config import validate
from veilfed.errors import Code
from veilfed.jobs import BlindfedStrategy, Cohort, JobSpec
from veilfed.wire.tensors import Arrays
from veilfed_study import simulation
from veilfed_study.analytic import clients_of
from veilfed_study.blind_data import BlindSubject
from veilfed_study.parts import TEST_FRACTION, Part, Parts
from veilfed_study.store import Store, key_of
from veilfed_study.summary import spread

__all__ = ["Grid", "Place", "Settings", "Variant", "drawn", "study", "variants"]

# Changes when the figures of a job are measured in another way.
FORM = 1

LAST_BLOCK = "last released block"
# Of a round, where rounds of more steps are beside the others: do few steps hold the adapters back?
MORE_EPOCHS = 5


@dataclass(frozen=True)
class Settings:
    """Of the adapters' jobs; probes have their strategies' own, and the same rounds."""

    rounds: int = 50
    rate: float = 0.1
    epochs: int = 1
    batch_size: int = 16
    alpha: float = 0.3


@dataclass(frozen=True)
class Place:
    """How the training rows are divided; without `alpha` they are one client's."""

    clients: int
    alpha: float | None

    @property
    def label(self) -> str:
        return "centralised" if self.alpha is None else f"{self.clients} clients, alpha {self.alpha:g}"


@dataclass(frozen=True)
class Grid:
    """All values of alpha at the first number of clients, the other numbers at the first alpha; and the ranks."""

    clients: Sequence[int]
    alphas: Sequence[float]
    ranks: Sequence[int]

    @property
    def places(self) -> list[Place]:
        return [
            Place(1, None),
            *(Place(self.clients[0], alpha) for alpha in self.alphas),
            *(Place(count, self.alphas[0]) for count in self.clients[1:]),
        ]


@dataclass(frozen=True)
class Variant:
    """What is trained. Adapters have a rank and a sampling of blocks, probes a source.

    `epochs` of a round, where they are not those of the settings; `only` the place with this number, None for all.
    """

    name: str
    label: str
    method: Literal["adapters", "afl", "averaging"]
    rank: int | None = None
    sampling: Literal["fixed", "round", "all"] = "fixed"
    source: str = LAST_BLOCK
    epochs: int | None = None
    only: int | None = None


def variants(ranks: Sequence[int], sources: Sequence[str]) -> list[Variant]:
    """The first rank with every sampling; other ranks centralised, more epochs in the first division; the probes."""
    said = {"fixed": "blocks drawn once", "round": "blocks drawn in each round", "all": "all blocks"}
    first = [
        Variant(f"adapters-{name}", f"BlindFed, {text}", "adapters", ranks[0], name)  # type: ignore[arg-type]
        for name, text in said.items()
    ]
    others = [
        Variant(f"adapters-rank-{rank}", f"BlindFed, {said['fixed']}, rank {rank}", "adapters", rank, only=0)
        for rank in ranks[1:]
    ]
    label = f"BlindFed, {said['fixed']}, {MORE_EPOCHS} epochs"
    others.append(Variant("adapters-epochs", label, "adapters", ranks[0], epochs=MORE_EPOCHS, only=1))
    labels = {"table": "published token table", "student": "student's embedding", "teacher": "teacher's embedding"}
    return [
        *first,
        *others,
        Variant("probe-averaging", f"probe, averaged: {LAST_BLOCK}", "averaging"),
        Variant("probe", f"probe, AFL: {LAST_BLOCK}", "afl"),
        *(
            Variant(f"probe-{name}", f"probe, AFL: {labels[name]}", "afl", source=name)
            for name in labels
            if name in sources
        ),
    ]


def drawn(blocks: int, seed: int, number: int = 0) -> list[int]:
    """The released blocks, as the oracle draws them; 0 is the draw for life, and each round may have one of its own."""
    return list(fixed(f"study {seed}".encode(), "", str(number), blocks))


def study(
    subjects: Sequence[BlindSubject],
    seeds: Sequence[int],
    grid: Grid,
    settings: Settings,
    store: Store,
    ended: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """Everything that was measured, as JSON; jobs that were finished before are read from their files.

    Raises VeilfedError: DATA_INVALID, INPUT_INVALID, JOB_INVALID, UPDATE_INVALID for training that diverged.
    """
    first = subjects[0]
    train, held = split(first.samples, first.classes, TEST_FRACTION, seeds[0])
    return {
        "study": "blind",
        "classes": list(first.classes),
        "rows": {"training": len(train), "test": len(held)},
        "seeds": list(seeds),
        "settings": asdict(settings),
        "rank": grid.ranks[0],
        "places": [{"label": place.label, **asdict(place)} for place in grid.places],
        "students": [
            {
                "label": subject.label,
                **subject.about,
                "dimension": subject.dimension,
                "tokens": subject.tokens,
                "released": {str(seed): drawn(subject.blocks, seed) for seed in seeds},
                "rows": [
                    _row(_Jobs(subject, seeds, settings, store, ended), variant, grid.places)
                    for variant in variants(grid.ranks, list(subject.embeddings))
                ],
            }
            for subject in subjects
        ],
    }


@dataclass(frozen=True)
class _Jobs:
    """The jobs of one student, in their files."""

    subject: BlindSubject
    seeds: Sequence[int]
    settings: Settings
    store: Store
    ended: Callable[[str], None]

    def result(self, variant: Variant, place: Place, seed: int) -> dict[str, Any]:
        """What was measured of a job, from its file if it was finished before."""
        subject = self.subject
        said = asdict(variant)
        del said["label"], said["only"]
        key = key_of(FORM, subject.digest, said, asdict(place), seed, asdict(self.settings))
        name = f"{subject.label}-{variant.name}-{place.clients}-{place.alpha or 0:g}-{seed}"
        found = self.store.get(name, key)
        if found is None:
            found = self._measured(variant, place, seed)
            self.store.put(name, key, found)
        self.ended(f"{subject.label}: {variant.label}")
        return found

    def _measured(self, variant: Variant, place: Place, seed: int) -> dict[str, Any]:
        subject = self.subject
        train, held = split(subject.samples, subject.classes, TEST_FRACTION, seed)
        whole = Part(subject.domain(subject.embeddings["student"]), train, held)
        parts: Parts = {"all": whole}
        if place.alpha is not None:
            parts = clients_of(whole, place.clients, place.alpha, seed)
        started = time.process_time()
        measure = _adapters if variant.method == "adapters" else _probe
        accuracy, parameters = measure(subject, variant, self.settings, seed, parts)
        return {
            "accuracy": accuracy,
            "parameters": parameters,
            "seconds": round(time.process_time() - started, 2),
        }


def _row(jobs: _Jobs, variant: Variant, places: Sequence[Place]) -> dict[str, Any]:
    cells = []
    parameters: list[int] = []
    for place in places if variant.only is None else [places[variant.only]]:
        results = [jobs.result(variant, place, seed) for seed in jobs.seeds]
        parameters += [result["parameters"] for result in results]
        cells.append(
            {
                "place": place.label,
                "accuracy": spread([result["accuracy"] for result in results]),
                "seconds": float(np.mean([result["seconds"] for result in results])),
            }
        )
    return {
        **asdict(variant),
        "parameters": sorted(set(parameters)),
        "cells": cells,
    }


def _adapters(
    subject: BlindSubject, variant: Variant, settings: Settings, seed: int, parts: Parts
) -> tuple[float, int]:
    """Accuracy, and how many parameters are trained: those before the first released block never change."""

    def released(number: int) -> list[int]:
        if variant.sampling == "all":
            return list(range(1, subject.blocks + 1))
        return drawn(subject.blocks, seed, 1 + number if variant.sampling == "round" else 0)

    job = _adapters_job(subject, variant, settings, seed, list(parts))
    strategy = strategy_for(job)
    model, blocks = strategy.initial(), list[int]()
    trainers: dict[str, Trains] = {}
    for number in range(job.rounds):
        if released(number) != blocks:
            blocks = released(number)
            method = method_for(_with(job, blocks))
            trainers = {
                name: trainer_for(
                    method,
                    subject.features(part.train, blocks),
                    subject.labels[part.train],
                    seed=seed,
                    institution=name,
                    rounds=job.rounds,
                )
                for name, part in parts.items()
            }
        updates = [(1.0, trainer.train(model, None, number)[0]) for trainer in trainers.values()]
        model = strategy.fold(updates, partial(dict, model))
    blocks = released(job.rounds)
    held = next(iter(parts.values())).held
    right, of = method_for(_with(job, blocks)).evaluate(
        model, None, subject.features(held, blocks), subject.labels[held]
    )
    earliest = min(released(number)[0] for number in range(job.rounds))
    return right / of, _trained(model, earliest)


def _trained(model: Arrays, first: int) -> int:
    """Adapters from block `first` on, and the classifier."""
    return sum(array[first - 1 :].size if name.startswith("adapter") else array.size for name, array in model.items())


def _adapters_job(
    subject: BlindSubject, variant: Variant, settings: Settings, seed: int, clients: Sequence[str]
) -> JobSpec:
    """A job as it would be submitted, but that fewer clients than masks need may be alone in it."""
    document = {
        "name": "blind",
        "strategy": {
            "name": "blindfed",
            "classes": list(subject.classes),
            "dimension": subject.dimension,
            "blocks": subject.blocks,
            "released": [1],
            "tokens": subject.tokens,
            "rank": variant.rank,
            "rate": settings.rate,
            "alpha": settings.alpha,
            "epochs": variant.epochs or settings.epochs,
            "batch_size": settings.batch_size,
        },
        "cohort": {"train": [*clients, "second", "third"]},
        "rounds": settings.rounds,
        "quorum": 3,
        "seed": seed,
        "secure_aggregation": {},
    }
    job = validate(JobSpec, json.dumps(document), variant.label, Code.JOB_INVALID)
    return job.model_copy(update={"cohort": Cohort(train=list(clients))})


def _with(job: JobSpec, released: Sequence[int]) -> BlindfedStrategy:
    """The strategy with these blocks, which may be more than a job is allowed."""
    assert isinstance(job.strategy, BlindfedStrategy)  # noqa: S101  for mypy
    return job.strategy.model_copy(update={"released": list(released)})


def _probe(subject: BlindSubject, variant: Variant, settings: Settings, seed: int, parts: Parts) -> tuple[float, int]:
    """Accuracy, and the size of the classifier."""
    if variant.source == LAST_BLOCK:
        features = subject.pooled(drawn(subject.blocks, seed)[-1])
    else:
        features = subject.embeddings[variant.source]
    domain = subject.domain(features)
    given = {name: Part(domain, part.train, part.held) for name, part in parts.items()}
    trained = variant.method == "averaging"
    strategy: Mapping[str, Any] = {"name": "fedot", "transform": "identity"} if trained else {"name": "afl"}
    document = {
        "name": "probe",
        "strategy": {**strategy, "classes": list(subject.classes), "dimension": subject.dimension},
        "cohort": {"train": list(parts)},
        "rounds": settings.rounds if trained else 1,
        "quorum": len(parts),
        "seed": seed,
    }
    job = validate(JobSpec, json.dumps(document), variant.label, Code.JOB_INVALID)
    *_, last = simulation.rounds(job, given, min_class_samples=1)
    part = next(iter(given.values()))
    right, of = method_for(job.strategy).evaluate(last.model, None, *part.evaluation)
    return right / of, int(np.prod(job.strategy.classifier_shape))
