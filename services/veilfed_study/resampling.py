"""How far figures depend on which samples happen to be tested and on which seeds were taken: the Bayesian bootstrap.

Every group of the test rows and every seed gets a random weight, Exponential(1) (Rubin, 1981), and all figures are
computed again with these weights, DRAWS times. All methods have the same weights in one draw, so two methods are
compared on the same samples. A group in several domains (one icon in several styles) has one weight. No weight is zero,
so no domain is ever without samples.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from veilfed_study.parts import Parts

__all__ = ["DRAWS", "Weights", "drawn", "matrices", "weights_of"]

DRAWS = 1000

Weights = Mapping[str, NDArray[np.float64]]


def weights_of(parts: Parts, seed: int) -> Weights:
    """Domain -> the weights of its test rows in each draw [DRAWS, n], the sum of each draw 1."""
    groups = {name: [part.domain.samples.groups[row] for row in part.held] for name, part in parts.items()}
    place = {
        group: number for number, group in enumerate(sorted({group for mine in groups.values() for group in mine}))
    }
    drawn = np.random.default_rng(seed).exponential(size=(DRAWS, len(place)))
    found = {name: drawn[:, [place[group] for group in mine]] for name, mine in groups.items()}
    return {name: rows / rows.sum(axis=1, keepdims=True) for name, rows in found.items()}


def matrices(weights: Weights, hits: Sequence[Mapping[str, Sequence[int]]]) -> NDArray[np.float64]:
    """M of each draw [DRAWS, N, N]; `hits` has for each domain that is held out those of each domain's test rows."""
    columns = [rows @ np.array([held_out[name] for held_out in hits], np.float64).T for name, rows in weights.items()]
    return np.stack(columns, axis=2)


def drawn(seeds: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """The weighted mean of the M of each seed, in each draw: [DRAWS, N, N]."""
    weights = np.random.default_rng(len(seeds)).exponential(size=(len(seeds), DRAWS, 1, 1))
    mean: NDArray[np.float64] = np.sum(weights * np.array(seeds), axis=0) / weights.sum(axis=0)
    return mean
