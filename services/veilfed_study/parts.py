"""Domains, and which of their rows are for training and which are held for evaluation."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from client_agent.data.source import Samples, split
from veilfed.errors import Code, VeilfedError

__all__ = ["TEST_FRACTION", "Domain", "Part", "Parts", "split_parts", "validation_parts"]

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


Parts = Mapping[str, Part]


def split_parts(domains: Mapping[str, Domain], classes: Sequence[str], seed: int) -> dict[str, Part]:
    """Training and test split of each institution, as its agent draws them for a job with this seed.

    Raises VeilfedError(DATA_INVALID), naming the domain, where there are too few samples.
    """
    found = {}
    for name, domain in domains.items():
        try:
            found[name] = Part(domain, *split(domain.samples, classes, TEST_FRACTION, seed))
        except VeilfedError as error:
            raise VeilfedError(error.code, f"domain {name}: {error.message}", error.hint) from None
    return found


def validation_parts(whole: Parts, seed: int, folds: int, used: int) -> Iterator[dict[str, Part]]:
    """For each of the first `used` folds, the training splits without it and it alone. Test rows appear nowhere.

    Raises VeilfedError(DATA_INVALID), naming the domain, where a fold or the rest would be empty.
    """
    numbers = {name: fold_numbers(part, folds, seed) for name, part in whole.items()}
    for name, found in numbers.items():
        if any(len(set(found) - {fold}) == 0 or fold not in found for fold in range(used)):
            raise VeilfedError(
                Code.DATA_INVALID,
                f"domain {name}: its {len(found)} training rows are too few for {folds} folds",
                "Use fewer folds.",
            )
    for fold in range(used):
        yield {
            name: Part(part.domain, part.train[numbers[name] != fold], part.train[numbers[name] == fold])
            for name, part in whole.items()
        }


def fold_numbers(part: Part, folds: int, seed: int) -> NDArray[np.intp]:
    """The fold of each row of `part.train`: groups are whole, so that near-copies stay together, and even by class.

    A group with samples of several classes counts for its most frequent one, as in the split into training and test.
    """
    groups = [part.domain.samples.groups[row] for row in part.train]
    votes: dict[str, Counter[int]] = {}
    for group, label in zip(groups, part.domain.labels[part.train].tolist(), strict=True):
        votes.setdefault(group, Counter())[label] += 1
    by_class: dict[int, list[str]] = {}
    for group, counts in votes.items():
        by_class.setdefault(min(counts, key=lambda label: (-counts[label], label)), []).append(group)
    fold: dict[str, int] = {}
    for names in by_class.values():
        names.sort(key=lambda name: hashlib.sha256(f"validation:{seed}:{name}".encode()).digest())
        fold |= {name: place % folds for place, name in enumerate(names)}
    return np.array([fold[group] for group in groups], np.intp)
