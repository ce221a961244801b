"""Ridge regression on the raw columns of a table, without a foundation model: what the heart data give by themselves.

w = (Z^T Z + lambda I)^-1 Z^T y,   y = +1 or -1, columns of Z standardised, intercept free

Pooled, it learns from the training splits of all domains but the one that is held out, in one place; alone, from a
domain's own. The split is the study's, and lambda is chosen on the same validation folds as the methods' rates. Nothing
in it is random but the split.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from client_agent.data import heart
from veilfed_study.measures import area
from veilfed_study.parts import Part, Parts, split_parts, validation_parts
from veilfed_study.subjects import Subject
from veilfed_study.summary import figures

__all__ = ["baselines", "columns", "ridge"]

Float = NDArray[np.float64]
Fit = Callable[[Float], Float]

LAMBDAS = (0.1, 1.0, 10.0, 100.0, 1000.0)
FOLDS = 3  # as `sweep` has
NUMERIC = ("age", "trestbps", "chol", "thalch", "oldpeak", "ca")
WORDS = ("sex", "cp", "fbs", "restecg", "exang", "slope", "thal")


def columns(table: pd.DataFrame) -> Float:
    """Numbers with a mark where they are missing (NaN becomes the column's mean later), words as 0 and 1."""
    numeric = table[list(NUMERIC)].astype(float)
    numeric = numeric.mask((numeric == 0) & numeric.columns.isin(heart.ZERO_IS_MISSING))
    words = pd.get_dummies(table[list(WORDS)].astype("string").fillna("missing"))
    parts = [numeric, numeric.isna(), words]
    return np.concatenate([part.to_numpy(dtype=np.float64) for part in parts], axis=1)


def ridge(rows: Float, positive: NDArray[np.bool_], penalty: float) -> Fit:
    """A function from rows [n, c] to scores [n]: above 0 for positive ones. Missing values take the training mean."""
    known = ~np.isnan(rows).all(axis=0)
    mean = np.where(known, np.nanmean(np.where(known, rows, 0.0), axis=0), 0.0)
    filled = np.where(np.isnan(rows), mean, rows)
    spread = filled.std(axis=0)
    spread[spread == 0] = 1

    def standard(table: Float) -> Float:
        scaled: Float = (np.where(np.isnan(table), mean, table) - mean) / spread
        return scaled

    z, y = standard(rows), np.where(positive, 1.0, -1.0)
    weights = np.linalg.solve(z.T @ z + penalty * np.eye(z.shape[1]), z.T @ (y - y.mean()))
    return lambda table: standard(table) @ weights + y.mean()


def baselines(subject: Subject, splits: Sequence[int], packages: Path) -> dict[str, Any]:
    """Two rows for the tables of heart: pooled (G, P and C) and each hospital alone (P only); means over the splits."""
    tables = columns(pd.concat([heart.records(name, packages) for name in subject.domains]))
    ends = np.cumsum([len(domain.labels) for domain in subject.domains.values()])
    rows = dict(zip(subject.domains, np.split(tables, ends[:-1]), strict=True))
    pooled = _study(subject, splits, rows, lambda held_out, own, names: [name for name in names if name != held_out])
    alone = _study(subject, splits, rows, lambda held_out, own, names: [own])
    for found in (alone["figures"], alone["areas"]):
        for name in ("G", "C"):
            found[name] = {"mean": None, "sd": None, "seeds": [None] * len(splits)}
    return {
        "ridge-pooled": {"label": "ridge on the raw columns, pooled", **pooled["figures"], "areas": pooled["areas"]},
        "ridge-alone": {"label": "ridge on the raw columns, each alone", **alone["figures"], "areas": alone["areas"]},
    }


Sources = Callable[[str, str, list[str]], list[str]]


def _study(subject: Subject, splits: Sequence[int], rows: Mapping[str, Float], sources: Sources) -> dict[str, Any]:
    accuracies, areas = [], []
    for split in splits:
        whole = split_parts(subject.domains, subject.classes, split)
        folds = list(validation_parts(whole, split, FOLDS, FOLDS))
        penalty = max(
            LAMBDAS, key=lambda value: np.mean([_matrix(fold, rows, value, sources)[0].mean() for fold in folds])
        )
        accuracy, ranking = _matrix(whole, rows, penalty, sources)
        accuracies.append(accuracy)
        areas.append(ranking)
    return {"figures": figures(accuracies), "areas": figures(areas)}


def _matrix(parts: Parts, rows: Mapping[str, Float], penalty: float, sources: Sources) -> tuple[Float, Float]:
    """Accuracies and areas under the curve [N, N]: i is held out, j evaluates."""
    names = list(parts)
    accuracy, ranking = np.empty((len(names), len(names))), np.empty((len(names), len(names)))
    for i, held_out in enumerate(names):
        for j, own in enumerate(names):
            train = [(rows[name], parts[name]) for name in sources(held_out, own, names)]
            fit = ridge(*_stacked(train), penalty)
            scores, positive = fit(rows[own][parts[own].held]), parts[own].evaluation[1] == 1
            accuracy[i, j] = np.mean((scores > 0) == positive)
            value = area(scores, positive)
            ranking[i, j] = np.nan if value is None else value
    return accuracy, ranking


def _stacked(train: Sequence[tuple[Float, Part]]) -> tuple[Float, NDArray[np.bool_]]:
    return (
        np.concatenate([table[part.train] for table, part in train]),
        np.concatenate([part.training[1] == 1 for _, part in train]),
    )
