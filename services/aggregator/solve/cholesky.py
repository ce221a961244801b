"""A = L L^T of a symmetric positive definite matrix in float64, solutions with it, and its condition number."""

import numpy as np
from numpy.typing import NDArray

from veilfed.errors import Code, VeilfedError

__all__ = ["LIMIT", "Cholesky", "shifted"]

Double = NDArray[np.float64]

# Side of the blocks of the triangular solutions: within one, NumPy's general solver does.
BLOCK = 64
# Beyond this condition number no digit of a solution is certain.
LIMIT = 0.1 / float(np.finfo(np.float64).eps)
MAX_STEPS = 5


def shifted(matrix: Double, shift: float) -> Double:
    """matrix + shift I, a copy."""
    copy = matrix.copy()
    np.einsum("ii->i", copy)[:] += shift
    return copy


class Cholesky:
    """The factorisation of `matrix` [d, d], of which the lower triangle is read.

    Raises VeilfedError(SINGULAR), which says `what` the matrix is, where it is not positive definite or its condition
    number is beyond LIMIT.
    """

    def __init__(self, matrix: Double, what: str) -> None:
        try:
            self.lower = np.linalg.cholesky(matrix)
        except np.linalg.LinAlgError:
            raise VeilfedError(Code.SINGULAR, f"{what} is singular") from None
        # An estimate from below of the condition number in the 1-norm; most often it is exact or nearly so.
        self.condition = float(np.abs(matrix).sum(axis=0).max()) * self._inverse_norm()
        if not self.condition < LIMIT:
            raise VeilfedError(Code.SINGULAR, f"{what} is singular: its condition number is {self.condition:.1e}")

    def solve(self, right: Double) -> Double:
        """A^-1 right, of right [d, m]."""
        solution = right.astype(np.float64)
        starts = range(0, len(solution), BLOCK)
        for start in starts:
            rows = slice(start, start + BLOCK)
            solution[rows] -= self.lower[rows, :start] @ solution[:start]
            solution[rows] = np.linalg.solve(self.lower[rows, rows], solution[rows])
        for start in reversed(starts):
            rows, later = slice(start, start + BLOCK), slice(start + BLOCK, None)
            solution[rows] -= self.lower[later, rows].T @ solution[later]
            solution[rows] = np.linalg.solve(self.lower[rows, rows].T, solution[rows])
        return solution

    def _inverse_norm(self) -> float:
        """The 1-norm of A^-1, from below, by a few solutions (Higham, Accuracy and Stability, algorithm 15.4)."""
        size = len(self.lower)
        x = np.full((size, 1), 1 / size)
        estimate, best = 0.0, -1
        for _ in range(MAX_STEPS):
            y = self.solve(x)
            now = float(np.abs(y).sum())
            if not now > estimate:
                break
            estimate = now
            slope = self.solve(np.where(y >= 0, 1.0, -1.0))[:, 0]
            steepest = int(np.abs(slope).argmax())
            if steepest == best or abs(slope[steepest]) <= float(slope @ x[:, 0]):
                break
            best = steepest
            x = np.zeros((size, 1))
            x[best] = 1.0
        # The start that such searches miss: elements of alternating sign.
        signs = (-1.0) ** np.arange(size) * (1 + np.arange(size) / max(1, size - 1))
        return max(estimate, 2 * float(np.abs(self.solve(signs[:, None])).sum()) / (3 * size))
