"""Class vectors in a file: NAME.npz with `classes` (K names) and `class_vectors` (float32 [K, d])."""

import io
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from veilfed.errors import Code, VeilfedError
from veilfed.files import write_atomic
from veilfed.identity.material import read_file

__all__ = ["read_class_vectors", "write_class_vectors"]


def write_class_vectors(path: Path, classes: Sequence[str], vectors: NDArray[np.float32]) -> None:
    """Writes the file in one step. Raises VeilfedError(FILE_UNUSABLE)."""
    packed = io.BytesIO()
    np.savez(packed, classes=np.array(classes), class_vectors=vectors)
    write_atomic(path, packed.getvalue(), 0o644)


def read_class_vectors(path: Path, classes: Sequence[str]) -> NDArray[np.float32]:
    """The vectors of `classes`, in this order. Raises VeilfedError(INPUT_INVALID or FILE_UNUSABLE)."""
    try:
        with np.load(io.BytesIO(read_file(path)), allow_pickle=False) as archive:
            names, vectors = archive["classes"].tolist(), archive["class_vectors"]
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile):
        raise VeilfedError(Code.INPUT_INVALID, f"{path}: not an .npz file with classes and class_vectors") from None
    if vectors.ndim != 2 or vectors.dtype != np.float32 or len(names) != len(vectors):
        raise VeilfedError(Code.INPUT_INVALID, f"{path}: class_vectors are not float32, one row for each class")
    index = {name: row for row, name in enumerate(names)}
    if missing := [name for name in classes if name not in index]:
        raise VeilfedError(Code.INPUT_INVALID, f"{path}: no vector for the class {missing[0]!r} of the job")
    found: NDArray[np.float32] = vectors[[index[name] for name in classes]]
    return found
