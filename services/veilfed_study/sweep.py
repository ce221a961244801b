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
from veilfed_study.cells import job_of
from veilfed_study.methods import METHODS, MethodSettings
from veilfed_study.parts import Parts, split_parts, validation_parts
from veilfed_study.store import Store, key_of
from veilfed_study.subjects import Subject
from veilfed_study.summary import figures

__all__ = ["Grid", "choose", "settings_of", "sweep"]

FORM = 1
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
        lists = {"classifier_rate": self.classifier_rates, "blocks": self.blocks}
        names = METHODS[method].rates
        for values in itertools.product(*(lists.get(name, self.other_rates) for name in names)):
            yield dict(zip(names, values, strict=True))


def sweep(
    subject: Subject,
    methods: Sequence[str],
    seeds: Sequence[int],
    grid: Grid,
    folds: int,
    used: int,
    store: Store,
    ended: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """G, P and C on validation data of every setting of each method, and the choice; the first `used` folds count.

    Raises VeilfedError: INPUT_INVALID, and what `runner.run` says.
    """
    if not 1 <= used <= folds or folds < 2:
        raise VeilfedError(Code.INPUT_INVALID, "two folds are needed at least, and one of them must be used")
    data = subject.digest()
    whole = {seed: split_parts(subject.domains, subject.classes, seed) for seed in seeds}
    found: dict[str, Any] = {}
    for method in methods:
        rows: list[Row] = []
        for strategy in grid.of(method):
            matrices: list[Mapping[str, Any]] = []
            for seed in seeds:
                settings = MethodSettings(rounds=max(grid.rounds), strategy=strategy)
                name = f"{method}-{seed}-{key_of(strategy)[:12]}"
                key = key_of(FORM, data, method, seed, folds, used, list(grid.rounds), strategy)
                kept = store.get(name, key)
                if kept is None:
                    kept = _scores(
                        subject, method, settings, seed, validation_parts(whole[seed], seed, folds, used), grid
                    )
                    store.put(name, key, kept)
                matrices.append(kept)
                ended(method)
            rows += [
                {
                    **strategy,
                    "rounds": mark,
                    **{
                        name: float(np.mean([kept[str(mark)][name] for kept in matrices]))
                        for name in ("P", *(("G", "C") if METHODS[method].generalises else ()))
                    },
                }
                for mark in grid.rounds
            ]
        found[method] = {"grid": rows, "chosen": choose(rows)}
    return {
        "study": "sweep",
        "task": subject.name,
        "seeds": list(seeds),
        "folds": folds,
        "folds_used": used,
        "methods": found,
    }


def _scores(
    subject: Subject, method: str, settings: MethodSettings, seed: int, folds: Iterator[Parts], grid: Grid
) -> dict[str, Any]:
    """Number of rounds -> G, P and C of the mean matrix of all folds."""
    names = list(subject.domains)
    matrices: dict[int, list[list[list[float]]]] = {mark: [] for mark in grid.rounds}
    for parts in folds:
        rows: dict[int, list[list[float]]] = {mark: [] for mark in grid.rounds}
        for held_out in names:
            train = [name for name in names if name != held_out]
            job = job_of(subject, method, settings, seed, train, [held_out])
            for mark, accuracies in _at_marks(subject, job, parts, grid.rounds).items():
                rows[mark].append([accuracies[name] for name in names])
        for mark, matrix in rows.items():
            matrices[mark].append(matrix)
    means = {mark: figures([np.mean(matrix, axis=0)]) for mark, matrix in matrices.items()}
    return {str(mark): {name: mean[name]["mean"] for name in ("G", "P", "C")} for mark, mean in means.items()}


def _at_marks(subject: Subject, job: JobSpec, parts: Parts, marks: Sequence[int]) -> dict[int, dict[str, float]]:
    method = method_for(job.strategy)
    vectors = subject.class_vectors() if job.strategy.initial == "class_vectors" else None
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
    return {"methods": methods}
