"""The transform against the paper's formula with every matrix formed, and against finite differences."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from client_agent.trainers.cayley import rotate
from tests.support import dense

SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 7), st.integers(0, 2**31 - 1))


def draw(blocks: int, side: int, rows: int, seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(blocks, side, side, generator=generator, dtype=dtype)
    return x, torch.randn(rows, blocks * side, generator=generator, dtype=dtype)


def matrix(x: Tensor) -> Tensor:
    """w_l as the columns that `rotate` gives for the unit vectors."""
    return rotate(x, torch.eye(x.shape[0] * x.shape[1], dtype=x.dtype)).T


@settings(deadline=None)
@given(SHAPES)
def test_equals_the_formed_transform(shape: tuple[int, int, int, int]) -> None:
    x, h = draw(*shape)
    torch.testing.assert_close(rotate(x, h), h @ dense.transform(x).T)


@settings(deadline=None, max_examples=30)
@given(SHAPES)
def test_the_gradient_is_that_of_finite_differences(shape: tuple[int, int, int, int]) -> None:
    x, h = draw(*shape)
    assert torch.autograd.gradcheck(rotate, (x.requires_grad_(), h.requires_grad_()))


@settings(deadline=None)
@given(SHAPES)
def test_the_gradient_is_that_of_the_formed_transform(shape: tuple[int, int, int, int]) -> None:
    x, h = draw(*shape)
    x.requires_grad_()
    h.requires_grad_()
    weights = torch.cos(torch.arange(h.numel(), dtype=h.dtype)).view_as(h)
    ours = torch.autograd.grad((rotate(x, h) * weights).sum(), (x, h))
    theirs = torch.autograd.grad(((h @ dense.transform(x).T) * weights).sum(), (x, h))
    torch.testing.assert_close(ours, theirs)


def test_zero_is_the_identity_bit_for_bit() -> None:
    _, h = draw(3, 5, 11, seed=1, dtype=torch.float32)
    assert torch.equal(rotate(torch.zeros(3, 5, 5), h), h)


def test_only_the_skew_part_counts() -> None:
    x, h = draw(2, 6, 4, seed=2)
    torch.testing.assert_close(rotate(x + x.mT, h), h)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_orthogonal_with_determinant_one_at_any_size(scale: float) -> None:
    x, _ = draw(4, 8, 1, seed=3)
    w = matrix(scale * x)
    torch.testing.assert_close(w @ w.T, torch.eye(32, dtype=w.dtype), atol=1e-9, rtol=0)
    assert torch.linalg.det(w).item() == pytest.approx(1.0)


def test_blocks_do_not_mix() -> None:
    """Three blocks give what one dense block gives that holds them on its diagonal."""
    x, h = draw(3, 4, 9, seed=4)
    whole = torch.block_diag(*x)  # type: ignore[no-untyped-call]
    torch.testing.assert_close(rotate(x, h), rotate(whole.unsqueeze(0), h))
    w = matrix(x)
    assert torch.count_nonzero(w[:4, 4:]) == 0
    assert torch.count_nonzero(w[8:, :8]) == 0


def test_single_precision_agrees_with_double() -> None:
    x, h = draw(24, 16, 64, seed=5)
    torch.testing.assert_close(rotate(x.float(), h.float()).double(), rotate(x, h), atol=1e-4, rtol=0)


def test_shapes_and_dtypes_that_do_not_fit_are_refused() -> None:
    x, h = draw(2, 3, 4, seed=6)
    with pytest.raises(ValueError, match="does not transform"):
        rotate(x, h[:, :5])
    with pytest.raises(ValueError, match="does not transform"):
        rotate(x[:, :2], h)
    with pytest.raises(ValueError, match="the batch is"):
        rotate(x, h.float())
