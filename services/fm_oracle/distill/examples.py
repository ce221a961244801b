"""The public examples that a student is distilled on: a table of texts or a folder of images, with classes."""

import csv
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilfed.errors import Code, VeilfedError

__all__ = ["Examples", "read_examples"]

TEXT, LABEL = "text", "label"
ENDINGS = {".png", ".jpg", ".jpeg", ".webp"}
# Of each class, as near as equal contents allow: what probes are tested on, and no student is trained on.
TEST_TENTHS = 2


@dataclass(frozen=True)
class Examples:
    """Texts or encoded images with the number of their class; `test` is True for those that are kept for tests."""

    inputs: Sequence[Any]
    labels: NDArray[np.int64]
    classes: tuple[str, ...]
    test: NDArray[np.bool_]


def read_examples(path: Path, modality: str) -> Examples:
    """A CSV file with the columns `text` and `label`, or a folder of images, each in a folder of its class's name.

    Raises VeilfedError: FILE_UNUSABLE, or DATA_INVALID for what is no such file or has fewer than two classes.
    """
    inputs, names = _texts(path) if modality == "text" else _images(path)
    classes = tuple(sorted(set(names)))
    if len(classes) < 2:
        raise VeilfedError(
            Code.DATA_INVALID, f"{path}: {len(inputs)} examples of {len(classes)} classes; two are needed"
        )
    number = {name: index for index, name in enumerate(classes)}
    test = np.array([_tenth(item) < TEST_TENTHS for item in inputs])
    labels = np.array([number[name] for name in names], dtype=np.int64)
    if set(labels[test]) != set(labels[~test]):
        raise VeilfedError(Code.DATA_INVALID, f"{path}: a class has too few examples for training and a test")
    return Examples(inputs, labels, classes, test)


def _tenth(item: str | bytes) -> int:
    """Equal contents come to one side."""
    data = item if isinstance(item, bytes) else " ".join(item.split()).casefold().encode(errors="surrogatepass")
    return hashlib.sha256(data).digest()[0] % 10


def _texts(path: Path) -> tuple[list[str], list[str]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file)
            if not {TEXT, LABEL} <= set(rows.fieldnames or ()):
                raise VeilfedError(Code.DATA_INVALID, f"{path}: needs the columns {TEXT!r} and {LABEL!r}")
            pairs = [(row[TEXT] or "", row[LABEL] or "") for row in rows]
    except OSError as error:
        raise VeilfedError(Code.FILE_UNUSABLE, f"{path}: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error):
        raise VeilfedError(Code.DATA_INVALID, f"{path}: not a CSV file in UTF-8") from None
    for number, (text, label) in enumerate(pairs, start=1):
        if not text.strip() or not label:
            raise VeilfedError(Code.DATA_INVALID, f"{path}: row {number} has no text or no label")
    return [text for text, _ in pairs], [label for _, label in pairs]


def _images(path: Path) -> tuple[list[bytes], list[str]]:
    if not path.is_dir():
        raise VeilfedError(Code.FILE_UNUSABLE, f"{path}: not a folder of images")
    try:
        files = sorted(file for file in path.rglob("*") if file.suffix.lower() in ENDINGS)
        return [file.read_bytes() for file in files], [file.parent.name for file in files]
    except OSError as error:
        raise VeilfedError(Code.FILE_UNUSABLE, f"{error.filename or path}: {error.strerror}") from None
