"""What a study found: matrices, G, P and C with their spread over the seeds, in one JSON document.

M[i, j] is the fraction of right answers of j on its own test split in the job that held i out: with its private
tensors if j is not i (P is the mean of these), with the model alone if it is (G). C is the mean of all N^2.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilfed_study.cells import Cell
from veilfed_study.methods import METHODS, Settings
from veilfed_study.parts import split_parts
from veilfed_study.resampling import drawn, interval
from veilfed_study.runner import Results
from veilfed_study.subjects import Subject

__all__ = ["document", "figures", "spread"]

Matrix = NDArray[np.float64]  # without a value: NaN


def document(
    subject: Subject, methods: Sequence[str], seeds: Sequence[int], settings: Settings, results: Results
) -> dict[str, Any]:
    """All figures of a study. Spreads are standard deviations over the seeds (n - 1); with one seed there is none.

    `intervals` has for two methods those of their differences on test groups and seeds that are drawn again
    (`resampling`).
    """
    return {
        "study": "fedot",
        "task": subject.name,
        "title": subject.title,
        "model": subject.model,
        "dimension": subject.dimension,
        "domains": {name: len(domain.labels) for name, domain in subject.domains.items()},
        "classes": list(subject.classes),
        "seeds": list(seeds),
        "split": settings.split,
        "methods": {method: _method(subject, method, seeds, results) for method in methods},
        "intervals": _intervals(subject, methods, seeds, settings, results),
    }


def figures(matrices: Sequence[Matrix]) -> dict[str, Any]:
    """G, P and C of one matrix for each seed: mean, spread and the value for each seed."""
    off = ~np.eye(len(matrices[0]), dtype=bool)
    return {
        "G": spread([_mean(np.diagonal(matrix)) for matrix in matrices]),
        "P": spread([_mean(matrix[off]) for matrix in matrices]),
        "C": spread([_mean(matrix) for matrix in matrices]),
        "matrix": _listed(np.mean(matrices, axis=0)),
    }


def _method(subject: Subject, method: str, seeds: Sequence[int], results: Results) -> dict[str, Any]:
    names = list(subject.domains)
    mine = {cell: result for cell, result in results.items() if cell.method == method}
    last = {cell: result["accuracies"][-1] for cell, result in mine.items()}
    first = next(iter(mine.values()))
    found = {
        "label": METHODS[method].label,
        "settings": first["settings"],
        **figures([_matrix(names, method, seed, last) for seed in seeds]),
        "by_round": _by_round(names, method, seeds, mine),
        "conflict": _conflict(mine, seeds),
        "condition_number": _conditions(mine),
        **{name: first[name] for name in ("numbers_sent", "bytes_sent", "bytes_received", "private_freedom")},
        "seconds": round(sum(result["seconds"] for result in mine.values()), 1),
    }
    if first["areas"] is not None:
        areas = {cell: result["areas"] for cell, result in mine.items()}
        found["areas"] = figures([_matrix(names, method, seed, areas) for seed in seeds])
    return found


def _intervals(
    subject: Subject, methods: Sequence[str], seeds: Sequence[int], settings: Settings, results: Results
) -> dict[str, dict[str, dict[str, list[float]]]]:
    """one -> other -> figure -> the ends of the interval of one - other, of the figures that both have."""
    parts = [split_parts(subject.domains, subject.classes, settings.split_of(seed)) for seed in seeds]
    hits = {
        method: [[results[Cell(method, seed, held_out)]["hits"] for held_out in subject.domains] for seed in seeds]
        for method in methods
    }
    figures = {
        method: _drawn_figures(method, matrices)
        for method, matrices in drawn(parts, hits, settings.split_of(seeds[0])).items()
    }
    return {
        one: {
            other: {name: interval(mine[name], theirs[name]) for name in mine if name in theirs}
            for other, theirs in figures.items()
            if other != one
        }
        for one, mine in figures.items()
    }


def _drawn_figures(method: str, matrices: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
    """G, P and C [draws] of matrices [draws, N, N]; P alone for a method that has nothing for newcomers."""
    off = ~np.eye(matrices.shape[1], dtype=bool)
    personal = {"P": matrices[:, off].mean(axis=1)}
    if not METHODS[method].generalises:
        return personal
    return {"G": np.diagonal(matrices, axis1=1, axis2=2).mean(axis=1), **personal, "C": matrices.mean(axis=(1, 2))}


def _matrix(names: Sequence[str], method: str, seed: int, values: Mapping[Cell, Mapping[str, float | None]]) -> Matrix:
    """M [N, N] of one seed; without G for a method that has nothing for newcomers."""
    rows = [[values[Cell(method, seed, held_out)][name] for name in names] for held_out in names]
    matrix = np.array(rows, dtype=np.float64)
    if not METHODS[method].generalises:
        np.fill_diagonal(matrix, np.nan)
    return matrix


def _by_round(
    names: Sequence[str], method: str, seeds: Sequence[int], results: Results
) -> dict[str, list[float | None]]:
    """G and P of the model that each round starts from, mean over the seeds."""
    count = len(next(iter(results.values()))["accuracies"])
    rows = []
    for number in range(count):
        values = {cell: result["accuracies"][number] for cell, result in results.items()}
        rows.append(figures([_matrix(names, method, seed, values) for seed in seeds]))
    return {name: [row[name]["mean"] for row in rows] for name in ("G", "P")}


def _conflict(results: Results, seeds: Sequence[int]) -> dict[str, Any] | None:
    """Cosine of the institutions' steps of w_g: in each round, mean over all jobs, and for each seed."""
    by_seed = [[result["conflict"] for cell, result in results.items() if cell.seed == seed] for seed in seeds]
    if not all(rows and all(row and None not in row for row in rows) for rows in by_seed):
        return None
    means = np.mean(by_seed, axis=1)
    return {"by_round": means.mean(axis=0).tolist(), "seeds": means.tolist()}


def _conditions(results: Results) -> dict[str, float] | None:
    """Mean and largest condition number of the institutions' transforms at the end."""
    if any(result["condition_numbers"] is None for result in results.values()):
        return None
    numbers = [number for result in results.values() for number in result["condition_numbers"].values()]
    return {"mean": float(np.mean(numbers)), "largest": float(np.max(numbers))}


def _mean(values: Matrix) -> float:
    """NaN if a value is missing."""
    return float(np.mean(values))


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean and standard deviation (n - 1) over the seeds, and the values; nothing where one is missing."""
    if np.isnan(values).any():
        return {"mean": None, "sd": None, "seeds": [None] * len(values)}
    sd = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return {"mean": float(np.mean(values)), "sd": sd, "seeds": [float(value) for value in values]}


def _listed(matrix: Matrix) -> list[list[float | None]]:
    return [[None if np.isnan(value) else float(value) for value in row] for row in matrix]
