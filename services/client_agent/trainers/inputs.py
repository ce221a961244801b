"""Checks of what comes from outside: embeddings, labels, models."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from veilfed.errors import Code, VeilfedError
from veilfed.jobs import FLOAT32, Shapes
from veilfed.wire.tensors import Arrays

__all__ = ["Float", "Labels", "check_labels", "checked", "normalised", "unit"]

Float = NDArray[np.float32]
Labels = NDArray[np.int64]


def unit(rows: Tensor) -> Tensor:
    """The rows scaled to length 1."""
    scaled: Tensor = rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return scaled


def normalised(features: Float, dimension: int) -> Tensor:
    """Embeddings [n, d] scaled to length 1. Raises VeilfedError(DATA_INVALID), which names the first bad row."""
    if features.ndim != 2 or features.shape[1] != dimension or not len(features):
        raise VeilfedError(
            Code.DATA_INVALID, f"embeddings have shape {list(features.shape)}; the job needs [n, {dimension}], n > 0"
        )
    h = torch.from_numpy(np.array(features, np.float32))
    lengths = torch.linalg.vector_norm(h, dim=1, keepdim=True)
    bad = torch.nonzero(~(torch.isfinite(lengths) & (lengths > 0)).squeeze(1))
    if len(bad):
        raise VeilfedError(Code.DATA_INVALID, f"embedding {int(bad[0])} is zero or not finite")
    scaled: Tensor = h / lengths
    return scaled


def check_labels(labels: Labels, samples: int, classes: int) -> None:
    """One class index for each sample. Raises VeilfedError(DATA_INVALID)."""
    if labels.shape != (samples,) or labels.dtype != np.int64:
        raise VeilfedError(
            Code.DATA_INVALID, f"labels are {labels.dtype} {list(labels.shape)}; {samples} int64 are needed"
        )
    if samples and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise VeilfedError(Code.DATA_INVALID, f"labels must be between 0 and {classes - 1}")


def checked(arrays: Arrays, shapes: Shapes, dtype: Callable[[str], "np.dtype[Any]"] = lambda name: FLOAT32) -> Arrays:
    """The arrays, which must have exactly these names, shapes and element types. Raises VeilfedError(INPUT_INVALID)."""
    if arrays.keys() != shapes.keys():
        raise VeilfedError(Code.INPUT_INVALID, f"tensors {sorted(arrays)}; {sorted(shapes)} are needed")
    for name, shape in shapes.items():
        array, wanted = arrays[name], dtype(name)
        if array.shape != shape or array.dtype != wanted:
            raise VeilfedError(
                Code.INPUT_INVALID,
                f"the {name} is {array.dtype} {list(array.shape)}; {wanted} {list(shape)} is needed",
            )
    return arrays
