"""One shot against many rounds: the methods that solve in closed form beside those that are trained, on many clients.

The training rows of all domains together are divided among clients, with class shares from Dirichlet(alpha); every
method gets the same clients, and is tested on the test rows of all domains. A benchmark has its own training and test
rows.

    accuracy    fraction of right answers on the test rows, with the model alone: what a newcomer gets
    own         mean over the clients of the accuracy that each expects on its own mix of classes, with its private
                state if it has one: sum_c p_k(c) a_k(c), with the share p_k(c) of class c in its training rows and the
                accuracy a_k(c) on the test rows of class c
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from client_agent.data.partition import dirichlet
from client_agent.trainers import Method, method_for
from veilfed.config import validate
from veilfed.errors import Code, VeilfedError
from veilfed.jobs import JobSpec
from veilfed.wire.tensors import map_bytes
from veilfed_study import measures, simulation
from veilfed_study.cells import job_of, shown_settings
from veilfed_study.methods import METHODS, Settings
from veilfed_study.options import numbers
from veilfed_study.parts import Part, Parts, split_parts
from veilfed_study.scale import pooled
from veilfed_study.store import Store, key_of
from veilfed_study.subjects import Subject
from veilfed_study.summary import spread

__all__ = ["ONE_SHOT", "Grid", "Variant", "clients_of", "methods_of", "ridges_of", "study", "variants", "whole_of"]

# Changes when the figures of a job are measured in another way.
FORM = 1

ONE_SHOT = {"afl": "AFL", "fedcgs": "FedCGS"}

Ridge = float | Literal["gcv"]


@dataclass(frozen=True)
class Grid:
    """What is varied. `least` are policies: an institution leaves out its classes with fewer samples."""

    clients: Sequence[int]
    alphas: Sequence[float]
    ridges: Sequence[Ridge]
    least: Sequence[int]


@dataclass(frozen=True)
class Variant:
    """A method with one choice of what is varied of it; the keys that other methods lack are None."""

    method: str
    ridge: Ridge | None = None
    least: int | None = None

    @property
    def name(self) -> str:
        parts = [self.method, *(str(part) for part in (self.ridge, self.least) if part is not None)]
        return "-".join(parts)

    @property
    def label(self) -> str:
        said = [ONE_SHOT.get(self.method) or METHODS[self.method].label]
        if self.ridge is not None:
            said.append("lambda by GCV" if self.ridge == "gcv" else f"lambda {self.ridge:g}")
        if self.least is not None and self.least > 1:
            said.append(f"classes from {self.least} samples on")
        return ", ".join(said)


def methods_of(names: str) -> list[str]:
    """The methods of a list such as "afl,fedot-b", in its order.

    Raises VeilfedError(INPUT_INVALID) for an unknown one, and for one that has nothing to train or needs class vectors.
    """
    possible = [*ONE_SHOT, *(name for name, method in METHODS.items() if method.trains and not method.class_vectors)]
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in possible]
    if unknown or not wanted or len(set(wanted)) != len(wanted):
        which = f"{unknown[0]!r} is no method of this study" if unknown else "--methods takes distinct names"
        raise VeilfedError(Code.INPUT_INVALID, which, f"Methods: {', '.join(possible)}.")
    return wanted


def ridges_of(text: str) -> list[Ridge]:
    """The values of a list such as "0.1,1,gcv". Raises VeilfedError(INPUT_INVALID)."""
    parts = [part.strip() for part in text.split(",")]
    plain = [part for part in parts if part != "gcv"]
    found: list[Ridge] = [*numbers(",".join(plain), float, "--ridges")] if plain else []
    if len(parts) - len(plain) > 1:
        raise VeilfedError(Code.INPUT_INVALID, "--ridges: gcv is there twice")
    return [*found, "gcv"] if len(plain) < len(parts) else found


def variants(methods: Sequence[str], grid: Grid) -> list[Variant]:
    """All choices of each method."""
    found = []
    for method in methods:
        if method not in ONE_SHOT:
            found.append(Variant(method))
            continue
        ridges = grid.ridges if method == "afl" else [None]
        found += [Variant(method, ridge, least) for least in grid.least for ridge in ridges]
    return found


def whole_of(subject: Subject, split: int) -> Part:
    """The rows of all domains, divided into training and test by this seed, or as a benchmark has them."""
    if subject.test_domain is None:
        return pooled(list(split_parts(subject.domains, subject.classes, split).values()))
    parts = []
    for name, domain in subject.domains.items():
        rows, none = np.arange(len(domain.labels), dtype=np.intp), np.empty(0, np.intp)
        parts.append(Part(domain, none, rows) if name == subject.test_domain else Part(domain, rows, none))
    return pooled(parts)


def clients_of(whole: Part, count: int, alpha: float, seed: int) -> dict[str, Part]:
    """`count` clients among which the training rows are divided; each is to be tested on all test rows.

    Raises VeilfedError: INPUT_INVALID or DATA_INVALID where the rows cannot be divided so.
    """
    samples, train = whole.domain.samples, whole.train
    labels, groups = [samples.labels[row] for row in train], [samples.groups[row] for row in train]
    width = len(str(count))
    return {
        f"client-{place:0{width}}": Part(whole.domain, train[rows], whole.held)
        for place, rows in enumerate(dirichlet(labels, groups, count, alpha, seed), start=1)
    }


def study(
    subject: Subject,
    methods: Sequence[str],
    seeds: Sequence[int],
    grid: Grid,
    settings: Settings,
    store: Store,
    ended: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """Everything that was measured, as JSON; jobs that were finished before are read from their files.

    All divisions and jobs are made before the first is run. Raises VeilfedError: DATA_INVALID, INPUT_INVALID,
    JOB_INVALID, UPDATE_INVALID for training that diverged.
    """
    data = subject.digest()
    wholes = {seed: whole_of(subject, settings.split_of(seed)) for seed in seeds}
    places = [(count, alpha, seed) for count in grid.clients for alpha in grid.alphas for seed in seeds]
    divided = {place: clients_of(wholes[place[2]], *place) for place in places}
    chosen = variants(methods, grid)
    jobs = {
        (variant, place): _job(subject, variant, settings, place[2], list(divided[place]))
        for place in places
        for variant in chosen
    }
    found: dict[tuple[Variant, int, float], list[dict[str, Any]]] = {}
    for (variant, (count, alpha, seed)), job in jobs.items():
        name = f"{variant.name}-{seed}-{count}-{alpha:g}"
        key = key_of(
            FORM, data, subject.test_domain, settings.split_of(seed), alpha, variant.least, job.model_dump(mode="json")
        )
        kept = store.get(name, key)
        if kept is None:
            kept = _measured(job, divided[count, alpha, seed], len(subject.classes), variant.least)
            store.put(name, key, kept)
        found.setdefault((variant, count, alpha), []).append(kept)
        ended(variant.label)
    rows = wholes[seeds[0]]
    return {
        "study": "analytic",
        "task": subject.name,
        "title": subject.title,
        "model": subject.model,
        "dimension": subject.dimension,
        "classes": list(subject.classes),
        "rows": {"training": len(rows.train), "test": len(rows.held)},
        "seeds": list(seeds),
        "split": settings.split,
        "clients": list(grid.clients),
        "alphas": list(grid.alphas),
        "variants": [
            {
                "name": variant.name,
                "label": variant.label,
                "method": variant.method,
                "ridge": variant.ridge,
                "min_class_samples": variant.least,
                "settings": shown_settings(jobs[variant, places[0]]),
                "cells": [_cell(found[variant, count, alpha], count, alpha) for count, alpha in _pairs(grid)],
            }
            for variant in chosen
        ],
    }


def _pairs(grid: Grid) -> Iterator[tuple[int, float]]:
    return ((count, alpha) for count in grid.clients for alpha in grid.alphas)


def _cell(results: Sequence[dict[str, Any]], count: int, alpha: float) -> dict[str, Any]:
    """The figures of one place of the grid: accuracies over the seeds, and costs."""
    first = results[0]
    by_round = zip(*(result["by_round"] for result in results), strict=True)
    return {
        "clients": count,
        "alpha": alpha,
        **{name: spread([_number(result[name]) for result in results]) for name in ("accuracy", "own")},
        "by_round": [spread([_number(value) for value in values])["mean"] for values in by_round],
        **{name: first[name] for name in ("rounds", "bytes_sent", "bytes_received")},
        "samples_used": float(np.mean([result["samples_used"] for result in results])),
        "seconds": round(float(np.mean([result["seconds"] for result in results])), 3),
    }


def _number(value: float | None) -> float:
    """NaN where there is none."""
    return float("nan") if value is None else value


def _job(subject: Subject, variant: Variant, settings: Settings, seed: int, clients: list[str]) -> JobSpec:
    """Raises VeilfedError(JOB_INVALID)."""
    if variant.method not in ONE_SHOT:
        return job_of(subject, variant.method, settings.of(variant.method), seed, clients, [])
    document = {
        "name": f"{subject.name}-{variant.method}-{seed}",
        "strategy": {
            "name": variant.method,
            "classes": list(subject.classes),
            "dimension": subject.dimension,
            **({} if variant.ridge is None else {"ridge": variant.ridge}),
        },
        "cohort": {"train": clients},
        "rounds": 1,
        "quorum": len(clients),
        "seed": seed,
    }
    return validate(JobSpec, json.dumps(document), f"method {variant.method}", Code.JOB_INVALID)


def _measured(job: JobSpec, clients: Parts, classes: int, least: int | None) -> dict[str, Any]:
    """Runs a job. `seconds` are those of all parties together, one after the other, without the evaluation.

    There is no accuracy, None, where there was no solution: no client may tell its sums, or lambda is too small.
    """
    method = method_for(job.strategy)
    test = next(iter(clients.values())).evaluation
    steps = simulation.rounds(job, clients, min_class_samples=least or simulation.LEAST)
    by_round: list[float | None] = []
    sent, seconds, solved = 0, 0.0, True
    while True:
        started = time.monotonic()
        try:
            snapshot = next(steps, None)
        except VeilfedError as error:
            if error.code is not Code.SINGULAR:
                raise
            solved = False
            break
        seconds += time.monotonic() - started
        if snapshot is None:
            break
        last = snapshot
        by_round.append(_accuracy(method, snapshot, test))
        sent += measures.longest(snapshot.updates)
    return {
        "accuracy": by_round[-1] if solved else None,
        "own": _own(method, last, clients, classes) if solved else None,
        "by_round": by_round if solved else [None] * (job.rounds + 1),
        "rounds": job.rounds,
        # Of one client, in all rounds together; the last model is received too.
        "bytes_sent": sent,
        "bytes_received": (job.rounds + 1) * len(map_bytes(last.model)),
        "samples_used": _used(clients, least or 1),
        "seconds": round(seconds, 3),
    }


def _accuracy(
    method: Method[Any], snapshot: simulation.Snapshot, test: tuple[NDArray[np.float32], NDArray[np.int64]]
) -> float:
    correct, total = method.evaluate(snapshot.model, None, *test)
    return correct / total


def _own(method: Method[Any], last: simulation.Snapshot, clients: Parts, classes: int) -> float:
    """See above; classes without test rows are left out of a client's mix, and a client with no others of the mean."""
    features, labels = next(iter(clients.values())).evaluation
    counts = np.bincount(labels, minlength=classes)

    def by_class(client: str | None) -> NDArray[np.float64]:
        state = None if client is None else last.states.get(client)
        right = method.probabilities(last.model, state, features).argmax(axis=1) == labels
        return np.bincount(labels[right], minlength=classes) / np.maximum(counts, 1)

    shared = by_class(None)
    found = []
    for name, part in clients.items():
        mix = np.bincount(part.training[1], minlength=classes) * (counts > 0)
        if mix.any():
            reached = by_class(name) if name in last.states else shared
            found.append(float(mix @ reached / mix.sum()))
    return float(np.mean(found)) if found else float("nan")


def _used(clients: Parts, least: int) -> int:
    """Training rows that the policy lets be used, of all clients together."""
    counts = [np.bincount(part.training[1]) for part in clients.values()]
    return int(sum(count[count >= least].sum() for count in counts))
