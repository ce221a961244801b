"""Chooses the rates, r and rounds of methods on a validation part of the training splits. Test rows take no part.

Each institution's training split is cut into folds by group; a fold is evaluated by models that were trained on the
others, with one domain left out at a time as in the study. Every method of a sweep has the same grid.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from client_agent.trainers import method_for
from veilfed.errors import Code, VeilfedError
from veilfed.jobs import JobSpec
from veilfed_study import measures, simulation
from veilfed_study.cells import digests, job_of
from veilfed_study.methods import METHODS, MethodSettings
from veilfed_study.parts import Parts, split_parts, validation_parts
from veilfed_study.store import Store, key_of
from veilfed_study.subjects import Subject
from veilfed_study.summary import figures

__all__ = ["Grid", "Validation", "choose", "settings_of", "sweep"]

FORM = 2
CLOSE = 0.002  # settings whose score differs by no more cannot be told apart: the one with fewest rounds is taken

Row = dict[str, Any]


@dataclass(frozen=True)
class Grid:
    """What is tried: rates of w_g, rates of everything else that is trained, r, and numbers of rounds."""

    classifier_rates: Sequence[float]
    other_rates: Sequence[float]
    blocks: Sequence[int]
    rounds: Sequence[int]

    def of(self, method: str) -> Iterator[dict[str, Any]]:
        """The settings of a method, without rounds."""
        lists = {
            "classifier_rate": self.classifier_rates,
            "header_rate": self.classifier_rates,  # FedGH: of w_g too
            "blocks": self.blocks,
        }
        names = METHODS[method].rates
        for values in itertools.product(*(lists.get(name, self.other_rates) for name in names)):
            yield dict(zip(names, values, strict=True))


@dataclass(frozen=True)
class Validation:
    """Which rows settings are chosen on: of the training rows of the split with seed `split`, the first `used` folds.

    Folds too are drawn with `split`; the seeds of a sweep move first values and batches alone.
    """

    split: int
    folds: int
    used: int


def sweep(
    subject: Subject,
    methods: Sequence[str],
    seeds: Sequence[int],
    grid: Grid,
    validation: Validation,
    store: Store,
    ended: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """G, P and C on validation data of every setting of each method, mean over folds and seeds, and the choice.

    All jobs are checked before the first is run. Raises VeilfedError: INPUT_INVALID, and what `runner.run` says.
    """
    if not 1 <= validation.used <= validation.folds or validation.folds < 2:
        raise VeilfedError(Code.INPUT_INVALID, "two folds are needed at least, and one of them must be used")
    jobs = {
        (method, place, seed): _jobs(subject, method, strategy, seed, grid)
        for method in methods
        for place, strategy in enumerate(grid.of(method))
        for seed in seeds
    }
    whole = split_parts(subject.domains, subject.classes, validation.split)
    folds = list(validation_parts(whole, validation.split, validation.folds, validation.used))
    data = digests(subject, (job for mine in jobs.values() for job in mine.values()))
    kept: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for (method, place, seed), mine in jobs.items():
        specs = [job.model_dump(mode="json") for job in mine.values()]
        read = data[next(iter(mine.values())).strategy.takes_class_vectors]
        name, key = f"{method}-{seed}", key_of(FORM, read, vars(validation), list(grid.rounds), specs)
        found = store.get(name, key)
        if found is None:
            found = _scores(subject, mine, folds, grid)
            store.put(name, key, found)
        kept.setdefault((method, place), []).append(found)
        ended(method)
    rows = {method: _rows(method, grid, kept) for method in methods}
    return {
        "study": "sweep",
        "task": subject.name,
        "seeds": list(seeds),
        **vars(validation),
        "methods": {method: {"grid": found, "chosen": choose(found)} for method, found in rows.items()},
    }


def _jobs(subject: Subject, method: str, strategy: dict[str, Any], seed: int, grid: Grid) -> dict[str, JobSpec]:
    """By the domain that is held out, with the most rounds of the grid."""
    names = list(subject.domains)
    settings = MethodSettings(rounds=max(grid.rounds), strategy=strategy)
    return {
        held_out: job_of(subject, method, settings, seed, [name for name in names if name != held_out], [held_out])
        for held_out in names
    }


def _rows(method: str, grid: Grid, kept: Mapping[tuple[str, int], Sequence[Mapping[str, Any]]]) -> list[Row]:
    figures = ("G", "P", "C") if METHODS[method].generalises else ("P",)
    return [
        {
            **strategy,
            "rounds": mark,
            **{name: float(np.mean([found[str(mark)][name] for found in kept[method, place]])) for name in figures},
        }
        for place, strategy in enumerate(grid.of(method))
        for mark in grid.rounds
    ]


def _scores(subject: Subject, jobs: Mapping[str, JobSpec], folds: Sequence[Parts], grid: Grid) -> dict[str, Any]:
    """Number of rounds -> G, P and C of the mean matrix of all folds."""
    names = list(subject.domains)
    matrices: dict[int, list[list[list[float]]]] = {mark: [] for mark in grid.rounds}
    for parts in folds:
        rows: dict[int, list[list[float]]] = {mark: [] for mark in grid.rounds}
        for job in jobs.values():
            for mark, accuracies in _at_marks(subject, job, parts, grid.rounds).items():
                rows[mark].append([accuracies[name] for name in names])
        for mark, matrix in rows.items():
            matrices[mark].append(matrix)
    means = {mark: figures([np.mean(matrix, axis=0)]) for mark, matrix in matrices.items()}
    return {str(mark): {name: mean[name]["mean"] for name in ("G", "P", "C")} for mark, mean in means.items()}


def _at_marks(subject: Subject, job: JobSpec, parts: Parts, marks: Sequence[int]) -> dict[int, dict[str, float]]:
    method = method_for(job.strategy)
    vectors = subject.class_vectors() if job.strategy.takes_class_vectors else None
    return {
        snapshot.round: measures.accuracies(method, snapshot.model, snapshot.states, parts)
        for snapshot in simulation.rounds(job, parts, vectors)
        if snapshot.round in marks
    }


def choose(rows: Sequence[Row]) -> Row:
    """Of those close to the largest C (P where there is no C): fewest rounds, then the largest."""
    score = "C" if "C" in rows[0] else "P"
    least = max(row[score] for row in rows) - CLOSE - 1e-9
    return min((row for row in rows if row[score] >= least), key=lambda row: (row["rounds"], -row[score]))


def settings_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """The choice as a settings file."""
    methods = {}
    for method, found in document["methods"].items():
        chosen = found["chosen"]
        methods[method] = {
            "rounds": chosen["rounds"],
            "strategy": {name: chosen[name] for name in METHODS[method].rates},
        }
    return {"split": document["split"], "methods": methods}
