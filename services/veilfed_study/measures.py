"""What is measured of a round: accuracies, areas under the curve, gradient conflict, condition numbers, bytes."""

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from client_agent.trainers import Method, State
from veilfed.jobs import CLASSIFIER
from veilfed.wire.tensors import Arrays, map_bytes
from veilfed_study.parts import Parts

__all__ = ["accuracies", "area", "areas", "condition_numbers", "conflict", "elements", "hits", "longest"]


def accuracies(method: Method[Any], model: Arrays, states: Mapping[str, State], parts: Parts) -> dict[str, float]:
    """Institution -> fraction of right answers, with its private state if it has one."""
    found = {}
    for name, part in parts.items():
        correct, total = method.evaluate(model, states.get(name), *part.evaluation)
        found[name] = correct / total
    return found


def hits(method: Method[Any], model: Arrays, states: Mapping[str, State], parts: Parts) -> dict[str, list[int]]:
    """Institution -> 1 for each row that it has right and 0 for others, as `accuracies` counts them."""
    found = {}
    for name, part in parts.items():
        features, labels = part.evaluation
        guesses = method.probabilities(model, states.get(name), features).argmax(axis=1)
        found[name] = (guesses == labels).astype(int).tolist()
    return found


def areas(
    method: Method[Any], model: Arrays, states: Mapping[str, State], parts: Parts
) -> dict[str, float | None] | None:
    """Institution -> area under the ROC curve of the second of two classes; None for more classes."""
    if len(method.strategy.classes) != 2:
        return None
    found = {}
    for name, part in parts.items():
        features, labels = part.evaluation
        found[name] = area(method.probabilities(model, states.get(name), features)[:, 1], labels == 1)
    return found


def area(scores: NDArray[Any], positive: NDArray[np.bool_]) -> float | None:
    """Chance that a positive scores above a negative, ties counting half; None if either is missing."""
    count = int(positive.sum())
    if count in {0, len(positive)}:
        return None
    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    wins = ranks[positive].sum() - count * (count + 1) / 2
    return float(wins / (count * (len(positive) - count)))


def conflict(model: Arrays, updates: Mapping[str, Arrays]) -> float | None:
    """Mean over pairs of institutions of the cosine of w_g^t - w_g^(i,t) and w_g^t - w_g^(j,t) (FEDOT, CVPR 2026).

    None where fewer than two institutions send a classifier that moved.
    """
    start = model[CLASSIFIER].astype(np.float64)
    steps = [start - update[CLASSIFIER].astype(np.float64) for update in updates.values() if CLASSIFIER in update]
    units = [step / length for step in steps if (length := np.linalg.norm(step)) > 0]
    cosines = [float(np.vdot(one, other)) for one, other in itertools.combinations(units, 2)]
    return float(np.mean(cosines)) if cosines else None


def condition_numbers(method: Method[Any], model: Arrays, states: Mapping[str, State]) -> dict[str, float] | None:
    """Institution -> condition number of its transform; None for a method whose transform is not linear."""
    found = {name: method.condition_number(model, state) for name, state in states.items()}
    known = {name: number for name, number in found.items() if number is not None}
    return known or None


def elements(arrays: Mapping[str, Any]) -> int:
    """Numbers in all tensors together."""
    return sum(int(np.asarray(array).size) for array in arrays.values())


def longest(updates: Mapping[str, Arrays]) -> int:
    """Bytes of the longest update, as it travels."""
    return max((len(map_bytes(update)) for update in updates.values() if update), default=0)
