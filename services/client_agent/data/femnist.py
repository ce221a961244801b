"""FEMNIST: handwritten characters by writer (Caldas et al., LEAF, 2018), from the JSON files that LEAF makes.

Each file is {"users": [writer], "num_samples": [n], "user_data": {writer: {"x": [[784 numbers]], "y": [class]}}}: 28 x
28 pixels row by row, from 0 (ink) to 1 (paper); classes 0-9 are digits, 10-35 capitals, 36-61 small letters.
"""

import json
import string
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from client_agent.data.config import Characters, FemnistConfig
from client_agent.data.pixels import png
from client_agent.data.samples import Samples, check_labels, content_group, invalid
from veilfed.errors import Code, VeilfedError

__all__ = ["classes", "load", "load_all"]

SIDE = 28
CLASSES = (*string.digits, *string.ascii_uppercase, *string.ascii_lowercase)

# A writer, and where it stands, for errors.
Writer = tuple[str, dict[str, Any], str]


def classes(characters: Characters = "all") -> tuple[str, ...]:
    """The names of the 62 classes, or of the ten digits."""
    return CLASSES if characters == "all" else CLASSES[:10]


def load(config: FemnistConfig) -> Samples:
    """The characters of one institution: of every `institutions`-th writer, in the order of files and of their lists.

    Raises VeilfedError: DATA_INVALID, or FILE_UNUSABLE for what cannot be read.
    """
    (samples,) = load_all([config])
    return samples


def load_all(configs: Sequence[FemnistConfig]) -> list[Samples]:
    """The same for several institutions of one folder, reading it once; the largest file is in memory at a time."""
    root = configs[0].root
    parts: list[_Part] = [_Part(config) for config in configs]
    count = 0
    for name, data, where in _writers(root):
        for part in parts:
            if count % part.config.institutions == part.config.institution - 1:
                part.add(name, data, where)
        count += 1
    for part in parts:
        if count < part.config.institutions:
            raise invalid(f"{root}: {count} writers; {part.config.institutions} institutions need one each at least")
    return [part.samples() for part in parts]


class _Part:
    """What is gathered of one institution."""

    def __init__(self, config: FemnistConfig) -> None:
        self.config = config
        self._wanted = len(classes(config.characters))
        self._images: list[bytes] = []
        self._labels: list[str] = []
        self._groups: list[str] = []

    def add(self, writer: str, data: dict[str, Any], where: str) -> None:
        pixels, indices = _arrays(data, where)
        for values, index in zip(pixels, indices.tolist(), strict=True):
            if index < self._wanted:
                image = png(values)
                self._images.append(image)
                self._labels.append(CLASSES[index])
                self._groups.append(writer if self.config.group == "writer" else content_group(image))

    def samples(self) -> Samples:
        config = self.config
        check_labels(self._labels, f"{config.root}: institution {config.institution} of {config.institutions}")
        return Samples("image", self._images, self._labels, self._groups)


def _writers(root: Path) -> Iterator[Writer]:
    if not root.is_dir():
        raise VeilfedError(Code.FILE_UNUSABLE, f"{root}: not a folder")
    paths = sorted(path for path in root.glob("*.json") if not path.name.startswith("."))
    if not paths:
        raise invalid(f"{root}: no *.json files; LEAF writes FEMNIST to data/femnist/data/all_data/all_data_*.json")
    seen: set[str] = set()
    for path in paths:
        document = _read(path)
        users, data = document["users"], document["user_data"]
        for number, user in enumerate(users, start=1):
            where = f"{path}: writer {number}"
            if not isinstance(user, str) or not isinstance(data.get(user), dict):
                raise invalid(f"{where} has no `user_data`")
            if user in seen:
                raise invalid(f"{where} occurs twice: are the files of several runs of LEAF in one folder?")
            seen.add(user)
            yield user, data[user], where


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise VeilfedError(Code.FILE_UNUSABLE, f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise invalid(f"{path}: not a JSON file") from None
    if (
        not isinstance(document, dict)
        or not isinstance(document.get("users"), list)
        or not isinstance(document.get("user_data"), dict)
    ):
        raise invalid(f"{path}: needs the keys `users` (a list) and `user_data`, as LEAF writes them")
    return document


def _arrays(data: dict[str, Any], where: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Pixels uint8 [n, 28, 28] and classes int64 [n] of one writer."""
    try:
        x, y = np.array(data["x"], np.float64), np.array(data["y"])
    except (KeyError, TypeError, ValueError):
        raise invalid(f"{where}: needs `x`, lists of {SIDE * SIDE} numbers, and `y`, a list of classes") from None
    if not len(y):
        return np.empty((0, SIDE, SIDE), np.uint8), np.empty(0, np.int64)
    if x.shape != (len(y), SIDE * SIDE) or y.ndim != 1:
        raise invalid(f"{where}: `x` is {list(x.shape)}; {list(y.shape)} classes need [n, {SIDE * SIDE}]")
    if not (np.isfinite(x).all() and x.min() >= 0 and x.max() <= 1):
        raise invalid(f"{where}: a pixel is not between 0 and 1")
    if y.dtype.kind not in "iu" or y.min() < 0 or y.max() >= len(CLASSES):
        raise invalid(f"{where}: a class is not a whole number from 0 to {len(CLASSES) - 1}")
    return np.rint(x * 255).astype(np.uint8).reshape(-1, SIDE, SIDE), y.astype(np.int64)
