"""Symmetric matrices as their upper triangle: d (d + 1) / 2 elements, row by row from the diagonal on."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilfed.errors import Code, VeilfedError

__all__ = ["diagonal", "pack", "side", "unpack"]

Double = NDArray[np.float64]


def side(elements: int) -> int:
    """d of a triangle of so many elements. Raises VeilfedError(INPUT_INVALID) if there is none."""
    found = (math.isqrt(8 * elements + 1) - 1) // 2
    if found * (found + 1) // 2 != elements:
        raise VeilfedError(Code.INPUT_INVALID, f"{elements} elements are not a triangle of a matrix")
    return found


def _rows(dimension: int) -> Iterator[tuple[int, slice]]:
    """Each row, and where its part of the triangle is."""
    start = 0
    for row in range(dimension):
        yield row, slice(start, start + dimension - row)
        start += dimension - row


def pack(matrix: NDArray[Any]) -> Double:
    """The upper triangle of a square matrix [d, d]; what is below the diagonal is not looked at."""
    dimension = len(matrix)
    packed = np.empty(dimension * (dimension + 1) // 2)
    for row, part in _rows(dimension):
        packed[part] = matrix[row, row:]
    return packed


def unpack(packed: NDArray[Any]) -> Double:
    """The symmetric matrix [d, d] of its upper triangle."""
    dimension = side(len(packed))
    matrix = np.empty((dimension, dimension))
    for row, part in _rows(dimension):
        matrix[row, row:] = packed[part]
        matrix[row:, row] = packed[part]
    return matrix


def diagonal(packed: NDArray[Any]) -> Double:
    """The diagonal [d] of a matrix in packed form."""
    steps = np.arange(side(len(packed)), 0, -1)
    return np.asarray(packed[np.concatenate([[0], np.cumsum(steps[:-1])])], dtype=np.float64)
