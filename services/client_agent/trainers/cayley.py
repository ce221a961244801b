"""The Cayley transform of a batch, without ever forming the orthogonal matrix (FEDOT, CVPR 2026, design 3 and 4).

    R = (X - X^T) / 2,   w_l = (I + R)(I - R)^-1 = 2 (I - R)^-1 - I

so that y = w_l h = 2 z - h where (I - R) z = h: one elimination of each diagonal block of w_l, and substitutions with
the whole batch as right-hand side. Backward, with g = dL/dy and the same factors transposed:

    (I - R)^T u = 2 g,   dL/dh = u - g,   dL/dR = u z^T,   dL/dX = (dL/dR - (dL/dR)^T) / 2

R is skew, so I - R is regular for every X (its singular values are 1 or more), and w_l is orthogonal with determinant
+1; X = 0 gives the identity.

Elimination goes by strips of rows, whose diagonal blocks are inverted, so that everything else is a product of
matrices. It needs no pivoting: the symmetric part of I - R is I, the inverse of each diagonal block is a part of the
inverse of a leading part of I - R, and that has no singular value above 1. Rounding errors grow with 1 + ||R||^2 (Golub
and Van Loan, Matrix Computations, 4.3.2): as small as those of LU with pivoting up to ||R|| of about 50.

    rotate(X [r, m, m], h [n, r m]) -> y [n, r m]     float32 or float64, differentiable in both arguments
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["rotate", "solved"]

# Rows of a strip. LAPACK inverts larger blocks slowly; products of thinner strips are slow.
_STRIP = 32


def _transposed(x: Tensor) -> Tensor:
    """A copy of x^T for each of r matrices [m, m]. Large ones are copied one by one, which torch does in tiles."""
    if x.shape[-1] <= 2 * _STRIP:
        return x.mT.clone(memory_format=torch.contiguous_format)
    copy = torch.empty_like(x)
    for target, block in zip(copy, x, strict=True):
        target.copy_(block.mT)
    return copy


def _skew(x: Tensor) -> Tensor:
    """(X - X^T) / 2, in one new array."""
    skew = _transposed(x)
    return torch.sub(x, skew, out=skew).div_(2)


class _Factors:
    """I - R = L U for each of r matrices, by strips.

    `matrix` [r, m, m] holds U above the strips' diagonal blocks, which are I in U, and L below them; `inverses` are
    those of L's diagonal blocks.
    """

    def __init__(self, matrix: Tensor, inverses: list[Tensor]) -> None:
        self.matrix = matrix
        self.inverses = inverses
        self._strips = _strips(matrix.shape[-1])

    @classmethod
    def of(cls, x: Tensor) -> "_Factors":
        matrix = _skew(x).neg_()
        matrix.diagonal(dim1=1, dim2=2).add_(1)
        inverses = []
        for start, end in _strips(x.shape[-1]):
            inverse = torch.linalg.inv(matrix[:, start:end, start:end])
            inverses.append(inverse)
            if end < x.shape[-1]:
                right = inverse @ matrix[:, start:end, end:]
                matrix[:, end:, end:].baddbmm_(matrix[:, end:, start:end], right, alpha=-1)
                matrix[:, start:end, end:] = right
        return cls(matrix, inverses)

    def solve(self, b: Tensor) -> Tensor:
        """(I - R)^-1 b for b [r, m, n]."""
        (_, end), *others = self._strips
        if not others:
            return self.inverses[0] @ b
        z = torch.empty_like(b)
        torch.bmm(self.inverses[0], b[:, :end], out=z[:, :end])
        for (start, end), inverse in zip(others, self.inverses[1:], strict=True):
            left = torch.baddbmm(b[:, start:end], self.matrix[:, start:end, :start], z[:, :start], alpha=-1)
            torch.bmm(inverse, left, out=z[:, start:end])
        for start, end in self._strips[-2::-1]:
            z[:, start:end].baddbmm_(self.matrix[:, start:end, end:], z[:, end:], alpha=-1)
        return z

    def solve_transposed(self, b: Tensor) -> Tensor:
        """(I - R)^-T b for b [r, m, n]."""
        *others, (last, _) = self._strips
        if not others:
            return self.inverses[0].mT @ b
        z = b.clone()
        for start, end in self._strips[1:]:
            z[:, start:end].baddbmm_(self.matrix[:, :start, start:end].mT, z[:, :start], alpha=-1)
        z[:, last:] = self.inverses[-1].mT @ z[:, last:]
        for (start, end), inverse in zip(others[::-1], self.inverses[-2::-1], strict=True):
            z[:, start:end].baddbmm_(self.matrix[:, end:, start:end].mT, z[:, end:], alpha=-1)
            z[:, start:end] = inverse.mT @ z[:, start:end]
        return z


def _strips(side: int) -> list[tuple[int, int]]:
    return [(start, min(start + _STRIP, side)) for start in range(0, side, _STRIP)]


class _Rotation(torch.autograd.Function):
    """Autograd's view of `rotate`, on h in blocks: X [r, m, m], h [r, m, n] -> y [r, m, n]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, h: Tensor) -> Tensor:
        factors = _Factors.of(x)
        z = factors.solve(h)
        ctx.save_for_backward(z, factors.matrix, *factors.inverses)
        y: Tensor = 2 * z - h
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (g,) = gradients
        z, matrix, *inverses = ctx.saved_tensors
        u = _Factors(matrix, inverses).solve_transposed((2 * g).contiguous())
        dx = _skew(u @ z.mT) if ctx.needs_input_grad[0] else None
        return dx, u - g if ctx.needs_input_grad[1] else None


def rotate(x: Tensor, h: Tensor) -> Tensor:
    """w_l h for each row h of a batch: X [r, m, m], h [n, r m] -> [n, r m].

    w_l is block-diagonal with r orthogonal blocks of side m (r = 1: FEDOT, more: FEDOT(+B)). The first derivatives
    are exact; there are no second ones. Raises ValueError where the shapes or dtypes do not match.
    """
    if x.dim() != 3 or h.dim() != 2 or x.shape[1] != x.shape[2] or h.shape[1] != x.shape[0] * x.shape[1]:
        raise ValueError(f"X {list(x.shape)} does not transform rows of {list(h.shape)}")
    if x.dtype != h.dtype:
        raise ValueError(f"X is {x.dtype}, the batch is {h.dtype}")
    n, blocks, side = h.shape[0], x.shape[0], x.shape[1]
    columns = h.reshape(n, blocks, side).permute(1, 2, 0).contiguous()
    rotated: Tensor = _Rotation.apply(x, columns)  # type: ignore[no-untyped-call]
    return rotated.permute(2, 0, 1).reshape(n, blocks * side)


def solved(x: Tensor, b: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """(I - R)^-1 b of X [r, m, m] and b [r, m, n], and a function that gives (I - R)^-T of its argument.

    For whoever needs the parts of a derivative; not differentiable.
    """
    factors = _Factors.of(x)
    return factors.solve(b.contiguous()), lambda right: factors.solve_transposed(right.contiguous())
