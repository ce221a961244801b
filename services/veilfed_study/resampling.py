"""How far figures depend on which samples happen to be tested and on which seeds were taken: the Bayesian bootstrap.

Every group of the test rows and every seed gets a random weight, Exponential(1) (Rubin, 1981), and all figures are
computed again with these weights, DRAWS times. All methods have the same weights in one draw, so two methods are
compared on the same samples. A group has one weight, in however many domains it is (one icon in several styles) and
under however many seeds it is tested. No weight is zero, so no domain is ever without samples.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from veilfed_study.parts import Parts

__all__ = ["DRAWS", "Hits", "Weights", "drawn", "interval", "matrices", "pieces"]

# With 1,000, the ends of an interval move by a tenth of its width with the generator's seed, and with them verdicts.
DRAWS = 20_000
PIECE = 500  # draws whose weights are in memory together

Hits = Mapping[str, Sequence[int]]  # of each domain: for each test row 1 if it was told right, else 0
Weights = Mapping[str, NDArray[np.float64]]


def drawn(
    parts: Sequence[Parts], hits: Mapping[str, Sequence[Sequence[Hits]]], seed: int
) -> dict[str, NDArray[np.float64]]:
    """Method -> its matrix M in each draw [DRAWS, N, N], the weighted mean over the seeds.

    `parts` are those of each seed; `hits` has for each method and seed those of each domain that is held out.
    """
    shares = np.random.default_rng(len(parts)).exponential(size=(len(parts), DRAWS, 1, 1))
    shares /= shares.sum(axis=0)
    found: dict[str, list[NDArray[np.float64]]] = {method: [] for method in hits}
    start = 0
    for weights in pieces(parts, seed):
        for method, seeds in hits.items():
            made = np.array([matrices(mine, rows) for mine, rows in zip(weights, seeds, strict=True)])
            found[method].append((shares[:, start : start + made.shape[1]] * made).sum(axis=0))
        start += made.shape[1]
    return {method: np.concatenate(rows) for method, rows in found.items()}


def pieces(parts: Sequence[Parts], seed: int) -> Iterator[list[Weights]]:
    """DRAWS draws, at most PIECE at a time: for each seed of a study, domain -> weights of its test rows [draws, n].

    The sum of each draw is 1 in each domain.
    """
    groups = [
        {name: [part.domain.samples.groups[row] for row in part.held] for name, part in mine.items()} for mine in parts
    ]
    every = sorted({group for mine in groups for rows in mine.values() for group in rows})
    place = {group: number for number, group in enumerate(every)}
    columns = [{name: [place[group] for group in rows] for name, rows in mine.items()} for mine in groups]
    rng = np.random.default_rng(seed)
    for start in range(0, DRAWS, PIECE):
        weights = rng.exponential(size=(min(PIECE, DRAWS - start), len(place)))
        yield [{name: _shares(weights[:, rows]) for name, rows in mine.items()} for mine in columns]


def _shares(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    shares: NDArray[np.float64] = weights / weights.sum(axis=1, keepdims=True)
    return shares


def matrices(weights: Weights, hits: Sequence[Hits]) -> NDArray[np.float64]:
    """M of each draw [draws, N, N]; `hits` are those of each domain that is held out."""
    columns = [rows @ np.array([held_out[name] for held_out in hits], np.float64).T for name, rows in weights.items()]
    return np.stack(columns, axis=2)


def interval(one: NDArray[np.float64], other: NDArray[np.float64]) -> list[float]:
    """Of one - other, both [DRAWS]: the 2.5th and the 97.5th percentile."""
    return [float(value) for value in np.percentile(one - other, [2.5, 97.5])]
