"""The transform against the paper's formula with every matrix formed, and against finite differences."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks import cayley
from client_agent.trainers.cayley import rotate
from tests.support import dense

# One strip of rows, several, and a last one that is not full.
SIDES = st.one_of(st.integers(1, 6), st.sampled_from([32, 33, 40, 64, 70]))
SHAPES = st.tuples(st.integers(1, 4), SIDES, st.integers(1, 7), st.integers(0, 2**31 - 1))


def draw(blocks: int, side: int, rows: int, seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(blocks, side, side, generator=generator, dtype=dtype)
    return x, torch.randn(rows, blocks * side, generator=generator, dtype=dtype)


def matrix(x: Tensor) -> Tensor:
    """w_l as the columns that `rotate` gives for the unit vectors."""
    return rotate(x, torch.eye(x.shape[0] * x.shape[1], dtype=x.dtype)).T


@given(SHAPES)
def test_equals_the_formed_transform(shape: tuple[int, int, int, int]) -> None:
    x, h = draw(*shape)
    torch.testing.assert_close(rotate(x, h), h @ dense.transform(x).T)


@pytest.mark.parametrize("shape", [(3, 1, 4), (2, 3, 5), (1, 6, 1), (1, 33, 2), (2, 34, 1)])
def test_the_gradient_is_that_of_finite_differences(shape: tuple[int, int, int]) -> None:
    x, h = draw(*shape, seed=9)
    assert torch.autograd.gradcheck(rotate, (x.requires_grad_(), h.requires_grad_()))


@given(SHAPES)
def test_the_gradient_is_that_of_the_formed_transform(shape: tuple[int, int, int, int]) -> None:
    x, h = draw(*shape)
    x.requires_grad_()
    h.requires_grad_()
    weights = torch.cos(torch.arange(h.numel(), dtype=h.dtype)).view_as(h)
    ours = torch.autograd.grad((rotate(x, h) * weights).sum(), (x, h))
    theirs = torch.autograd.grad(((h @ dense.transform(x).T) * weights).sum(), (x, h))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("side", [1, 5, 40, 80])
def test_the_arguments_stay_as_they_were(side: int) -> None:
    x, h = draw(2, side, 7, seed=8)
    before = x.clone(), h.clone()
    x.requires_grad_()
    h.requires_grad_()
    torch.autograd.grad(rotate(x, h).sum(), (x, h))
    assert torch.equal(x, before[0])
    assert torch.equal(h, before[1])


@pytest.mark.parametrize("side", [5, 48])
def test_zero_is_the_identity_bit_for_bit(side: int) -> None:
    _, h = draw(3, side, 11, seed=1, dtype=torch.float32)
    assert torch.equal(rotate(torch.zeros(3, side, side), h), h)


def test_only_the_skew_part_counts() -> None:
    x, h = draw(2, 6, 4, seed=2)
    torch.testing.assert_close(rotate(x + x.mT, h), h)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("side", [8, 40])
def test_orthogonal_with_determinant_one_at_any_size(scale: float, side: int) -> None:
    x, _ = draw(4, side, 1, seed=3)
    w = matrix(scale * x)
    torch.testing.assert_close(w @ w.T, torch.eye(4 * side, dtype=w.dtype), atol=1e-9, rtol=0)
    assert torch.linalg.det(w).item() == pytest.approx(1.0)


def test_blocks_do_not_mix() -> None:
    """Three blocks give what one dense block gives that holds them on its diagonal."""
    x, h = draw(3, 4, 9, seed=4)
    whole = torch.block_diag(*x)  # type: ignore[no-untyped-call]
    torch.testing.assert_close(rotate(x, h), rotate(whole.unsqueeze(0), h))
    w = matrix(x)
    assert torch.count_nonzero(w[:4, 4:]) == 0
    assert torch.count_nonzero(w[8:, :8]) == 0


@pytest.mark.parametrize(("blocks", "side"), [(24, 16), (6, 64)])
def test_single_precision_agrees_with_double(blocks: int, side: int) -> None:
    x, h = draw(blocks, side, 64, seed=5)
    torch.testing.assert_close(rotate(x.float(), h.float()).double(), rotate(x, h), atol=1e-4, rtol=0)


@pytest.mark.parametrize("scale", [0.01, 0.1, 1.0])
def test_without_pivoting_it_is_as_exact_as_with_it(scale: float) -> None:
    """||R|| is 0.2, 2.2 and 22: far beyond what a training makes of X."""
    x, h = draw(1, 256, 64, seed=11, dtype=torch.float32)
    exact = rotate(scale * x.double(), h.double())
    skew = scale * (x[0] - x[0].T) / 2
    pivoted = 2 * torch.linalg.solve(torch.eye(256) - skew, h.T).T - h
    ours, theirs = ((found.double() - exact).abs().max().item() for found in (rotate(scale * x, h), pivoted))
    assert ours <= 4 * theirs


@pytest.mark.parametrize("blocks", [1, 8])
def test_the_contenders_of_the_benchmark_do_the_same(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cayley, "DIMENSION", 96)
    losses: list[float] = []
    entropy = torch.nn.functional.cross_entropy

    def recorded(logits: Tensor, labels: Tensor) -> Tensor:
        loss = entropy(logits, labels)
        losses.append(loss.item())
        return loss

    monkeypatch.setattr(torch.nn.functional, "cross_entropy", recorded)
    steps = [cayley.ours(blocks), cayley.formed(blocks, cayley.by_inverse), cayley.formed(blocks, cayley.by_solve)]
    curves = []
    for step in steps:
        losses.clear()
        for _ in range(4):
            step()
        curves.append(list(losses))
    assert curves[0][3] < curves[0][0] - 0.1
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], abs=1e-4)


def test_shapes_and_dtypes_that_do_not_fit_are_refused() -> None:
    x, h = draw(2, 3, 4, seed=6)
    with pytest.raises(ValueError, match="does not transform"):
        rotate(x, h[:, :5])
    with pytest.raises(ValueError, match="does not transform"):
        rotate(x[:, :2], h)
    with pytest.raises(ValueError, match="the batch is"):
        rotate(x, h.float())
