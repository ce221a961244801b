"""Loads the samples that a configuration names, and splits them."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from client_agent.data.config import (
    CifarConfig,
    DataConfig,
    DomainSetConfig,
    DtdConfig,
    EmojiConfig,
    FemnistConfig,
    HeartConfig,
    HuggingFaceConfig,
    ImageFolderConfig,
    NumpyConfig,
    SvhnConfig,
    TableConfig,
    VaderConfig,
)
from client_agent.data.samples import Samples, invalid
from veilfed.packages import default_folder

__all__ = ["Samples", "class_indices", "load", "split"]

OwnConfig = ImageFolderConfig | TableConfig | NumpyConfig | HuggingFaceConfig
SetConfig = DomainSetConfig | FemnistConfig | CifarConfig | SvhnConfig | DtdConfig

SHOWN = 5  # unknown class names in one error


def load(config: DataConfig, packages: Path | None = None) -> Samples:
    """All samples of a source, in a fixed order; reads everything into memory.

    `packages` is where public data lies if the section does not say it itself; by default veilfed's packages folder.
    Raises VeilfedError: DATA_INVALID (naming file and row), DATA_MISSING, FILE_UNUSABLE or STATE_CORRUPT.
    """
    if isinstance(config, VaderConfig | EmojiConfig | HeartConfig):
        return _public(config, config.folder or packages or default_folder())
    if isinstance(config, OwnConfig):
        return _own(config)
    return _set(config)


# Sources load pandas, Pillow or resvg; an agent pays for its own source only.
# ruff: noqa: PLC0415


def _public(config: VaderConfig | EmojiConfig | HeartConfig, folder: Path) -> Samples:
    match config:
        case VaderConfig():
            from client_agent.data import vader

            return vader.load(config, folder)
        case EmojiConfig():
            from client_agent.data import emoji

            return emoji.load(config, folder)
        case HeartConfig():
            from client_agent.data import heart

            return heart.load(config, folder)


def _own(config: OwnConfig) -> Samples:
    match config:
        case ImageFolderConfig():
            from client_agent.data import image_folder

            return image_folder.load(config)
        case TableConfig():
            from client_agent.data import table

            return table.load(config)
        case NumpyConfig():
            from client_agent.data import arrays

            return arrays.load(config)
        case HuggingFaceConfig():
            from client_agent.data import huggingface

            return huggingface.load(config)


def _set(config: SetConfig) -> Samples:
    match config:
        case DomainSetConfig():
            from client_agent.data import standard

            return standard.load(config)
        case FemnistConfig():
            from client_agent.data import femnist

            return femnist.load(config)
        case CifarConfig():
            from client_agent.data import cifar

            return cifar.load(config)
        case SvhnConfig():
            from client_agent.data import svhn

            return svhn.load(config)
        case DtdConfig():
            from client_agent.data import dtd

            return dtd.load(config)


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

    A group is on one side as a whole. Within each class the groups are ordered by SHA-256 of `seed:group`; the
    first ones, as many as come closest to `test_fraction` of the class's samples, are for testing. So institutions that
    hold the same groups (the same icon in other styles) put them on the same side. A group with samples of several
    classes counts for its most frequent one. Each class has a group on both sides; a single one is for training.

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
        groups.sort(key=lambda group: hashlib.sha256(f"{seed}:{group}".encode()).digest())
        test_groups.update(groups[: _cut([votes[group].total() for group in groups], test_fraction)])
    is_test = np.array([group in test_groups for group in samples.groups], dtype=bool)
    train, test = np.flatnonzero(~is_test), np.flatnonzero(is_test)
    if not len(train) or not len(test):
        raise invalid(f"{len(samples)} samples in {len(votes)} groups are too few for a training and a test split")
    return train, test


def _cut(sizes: Sequence[int], fraction: float) -> int:
    """How many of the first groups come closest to `fraction` of the samples, with one group on each side at least."""
    reached = np.concatenate([[0], np.cumsum(sizes)])
    closest = int(np.argmin(np.abs(reached - fraction * reached[-1])))
    return min(max(closest, 1), len(sizes) - 1)
