"""Loads the samples that a configuration names, and splits them."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from client_agent.data.config import (
    DataConfig,
    EmojiConfig,
    HeartConfig,
    ImageFolderConfig,
    NumpyConfig,
    TableConfig,
    VaderConfig,
)
from client_agent.data.samples import Samples, invalid
from veilfed.packages import default_folder

__all__ = ["Samples", "class_indices", "load", "split"]

SHOWN = 5  # unknown class names in one error


def load(config: DataConfig, packages: Path | None = None) -> Samples:
    """All samples of a source, in a fixed order; reads everything into memory.

    `packages` is where public data lies if the section does not say it itself; by default veilfed's packages folder.
    Raises VeilfedError: DATA_INVALID (naming file and row), DATA_MISSING, FILE_UNUSABLE or STATE_CORRUPT.
    """
    # Sources load pandas, Pillow or resvg; an agent pays for its own source only.
    # ruff: noqa: PLC0415
    if isinstance(config, VaderConfig | EmojiConfig | HeartConfig):
        folder = config.folder or packages or default_folder()
        if isinstance(config, VaderConfig):
            from client_agent.data import vader

            return vader.load(config, folder)
        if isinstance(config, EmojiConfig):
            from client_agent.data import emoji

            return emoji.load(config, folder)
        from client_agent.data import heart

        return heart.load(config, folder)
    if isinstance(config, ImageFolderConfig):
        from client_agent.data import image_folder

        return image_folder.load(config)
    if isinstance(config, TableConfig):
        from client_agent.data import table

        return table.load(config)
    assert isinstance(config, NumpyConfig)  # noqa: S101  for mypy: the last of the union
    from client_agent.data import arrays

    return arrays.load(config)


def class_indices(labels: Sequence[str], classes: Sequence[str]) -> NDArray[np.int64]:
    """Class names -> indices [n] into `classes`, the job's list. Raises DATA_INVALID naming those not in it."""
    index = {name: position for position, name in enumerate(classes)}
    unknown = sorted(set(labels) - set(index))
    if unknown:
        more = f" and {len(unknown) - SHOWN} more" if len(unknown) > SHOWN else ""
        names = ", ".join(repr(name) for name in unknown[:SHOWN])
        raise invalid(f"the data has classes that the job does not name: {names}{more}")
    return np.array([index[label] for label in labels], dtype=np.int64)


def split(
    samples: Samples, classes: Sequence[str], test_fraction: float, seed: int
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Indices (train, test) of the samples, each in ascending order; together all of them, none twice.

    A group is on one side as a whole. Within each class the groups are ordered by SHA-256 of `seed:group` and the
    first ones, up to `test_fraction` of the class's samples, are for testing; so institutions that hold the same
    groups (the same icon in other styles) put them on the same side. A group with samples of several classes counts
    for its most frequent one. A class of a single group is for training.

    Raises VeilfedError(DATA_INVALID) for classes that are not in `classes` and if a side would be empty.
    """
    indices = class_indices(samples.labels, classes)
    votes: dict[str, Counter[int]] = {}
    for group, index in zip(samples.groups, indices.tolist(), strict=True):
        votes.setdefault(group, Counter())[index] += 1
    by_class: dict[int, list[str]] = {}
    for group, counts in votes.items():
        by_class.setdefault(min(counts, key=lambda index: (-counts[index], index)), []).append(group)
    test_groups: set[str] = set()
    for groups in by_class.values():
        test_groups.update(_test_groups(groups, votes, test_fraction, seed))
    is_test = np.array([group in test_groups for group in samples.groups], dtype=bool)
    train, test = np.flatnonzero(~is_test), np.flatnonzero(is_test)
    if not len(train) or not len(test):
        raise invalid(f"{len(samples)} samples in {len(votes)} groups are too few for a training and a test split")
    return train, test


def _test_groups(groups: list[str], votes: dict[str, Counter[int]], test_fraction: float, seed: int) -> list[str]:
    """Of the groups of one class, those for testing; the last one in the order is always for training."""
    ordered = sorted(groups, key=lambda group: hashlib.sha256(f"{seed}:{group}".encode()).digest())
    wanted = test_fraction * sum(votes[group].total() for group in ordered)
    chosen, samples = [], 0
    for group in ordered[:-1]:
        if samples >= wanted:
            break
        chosen.append(group)
        samples += votes[group].total()
    return chosen
