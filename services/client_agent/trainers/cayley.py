"""The Cayley transform of a batch, without ever forming the orthogonal matrix (FEDOT, CVPR 2026, design 3 and 4).

    R = (X - X^T) / 2,   w_l = (I + R)(I - R)^-1 = 2 (I - R)^-1 - I

so that y = w_l h = 2 z - h where (I - R) z = h: one LU factorisation of each diagonal block and triangular solves with
the whole batch as right-hand side. Backward, with g = dL/dy and the same factors transposed:

    (I - R)^T u = 2 g,   dL/dh = u - g,   dL/dR = u z^T,   dL/dX = (dL/dR - (dL/dR)^T) / 2

R is skew, so I - R is regular for every X (its singular values are 1 or more), and w_l is orthogonal with determinant
+1; X = 0 gives the identity. Blocks of a small side are inverted instead: as exact here, and quicker.

    rotate(X [r, m, m], h [n, r m]) -> y [n, r m]     float32 or float64, differentiable in both arguments
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["rotate"]


# Up to this side one batched inverse is 2-4 times quicker than solves, which cost a call per block; above it, slower.
_SMALL = 32


def _transposed(x: Tensor) -> Tensor:
    """A copy of x^T for each of r matrices [m, m]. Large ones are copied one by one, which torch does in tiles."""
    if x.shape[-1] <= _SMALL:
        return x.mT.contiguous()
    copy = torch.empty_like(x)
    for target, block in zip(copy, x, strict=True):
        target.copy_(block.mT)
    return copy


def _skew(x: Tensor) -> Tensor:
    """(X - X^T) / 2, in one new array."""
    skew = _transposed(x)
    return torch.sub(x, skew, out=skew).div_(2)


def _factor(x: Tensor) -> tuple[Tensor, ...]:
    """What `_solve` needs of I - R: the inverses, or LU factors and pivots."""
    transposed = _skew(x)
    transposed.diagonal(dim1=1, dim2=2).add_(1)
    matrices = transposed.mT  # column by column in memory, as LAPACK wants them
    if x.shape[-1] <= _SMALL:
        return (torch.linalg.inv(matrices),)
    factors, pivots = torch.linalg.lu_factor(matrices)
    return factors, pivots


def _solve(factored: tuple[Tensor, ...], right: Tensor, *, transposed: bool = False) -> Tensor:
    """A^-1 B, or A^-T B, for each of r matrices A [m, m] and B [m, n]."""
    if len(factored) == 1:
        return (factored[0].mT if transposed else factored[0]) @ right
    solution: Tensor = torch.linalg.lu_solve(*factored, right, adjoint=transposed)
    return solution


class _Rotation(torch.autograd.Function):
    """Autograd's view of `rotate`, on h in blocks: X [r, m, m], h [r, m, n] -> y [r, m, n]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, h: Tensor) -> Tensor:
        factored = _factor(x)
        z = _solve(factored, h)
        ctx.save_for_backward(z, *factored)
        y: Tensor = 2 * z - h
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (g,) = gradients
        z, *factored = ctx.saved_tensors
        u = _solve(tuple(factored), 2 * g, transposed=True)
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
    columns = h.reshape(n, blocks, side).permute(1, 2, 0)
    rotated: Tensor = _Rotation.apply(x, columns)  # type: ignore[no-untyped-call]
    return rotated.permute(2, 0, 1).reshape(n, blocks * side)
