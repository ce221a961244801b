"""What FEDOT promises about its numbers after a whole training, and the bound on gradient conflict."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from client_agent.trainers import Trainer, adam
from client_agent.trainers.cayley import rotate
from tests.support.methods import stepwise, strategy
from veilfed.wire.tensors import Arrays

ROUNDS = 6


def data(dimension: int, samples: int = 160) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    rng = np.random.default_rng(4)
    labels = rng.integers(0, 3, samples)
    features = rng.normal(0, 1, (samples, dimension))
    features[np.arange(samples), labels] += 4
    return features.astype(np.float32), labels


def departure(x: Tensor) -> float:
    """max |Q^T Q - I| of the transform that `rotate` computes in the precision of X; the product in float64."""
    q = rotate(x, torch.eye(x.shape[0] * x.shape[1], dtype=x.dtype)).double()
    return float((q.T @ q - torch.eye(len(q), dtype=torch.float64)).abs().max())


@pytest.mark.parametrize(("dimension", "blocks"), [(384, 1), (384, 24), (96, 2)])
def test_after_a_whole_training_the_transform_is_orthogonal_in_float32(dimension: int, blocks: int) -> None:
    made = strategy("fedot", dimension=dimension, blocks=blocks, batch_size=32, transform_rate=2e-3)
    trainer = Trainer(stepwise(made), *data(dimension), seed=1, institution="one")
    model: Arrays = {"classifier": (0.1 * np.eye(3, dimension)).astype(np.float32)}
    state = trainer.initial_state(model)
    for number in range(ROUNDS):
        model, state = trainer.train(model, state, number)
    x = torch.from_numpy(np.asarray(state.tensors["transform"], np.float32))
    assert float(x.abs().max()) > 0.01, "it was trained"
    assert departure(x) <= 5e-6
    assert departure(x.double()) <= 1e-12


@pytest.mark.parametrize(("dimension", "blocks"), [(96, 1), (96, 6)])
def test_after_a_whole_training_in_float64_the_transform_is_orthogonal(dimension: int, blocks: int) -> None:
    """The trainer's own step, in double precision."""
    features, labels = data(dimension)
    h = torch.nn.functional.normalize(torch.from_numpy(features).double())
    y, side = torch.from_numpy(labels), dimension // blocks
    w = (0.1 * torch.eye(3, dimension, dtype=torch.float64)).requires_grad_()
    x = torch.zeros(blocks, side, side, dtype=torch.float64, requires_grad=True)
    parameters = [adam.Parameter(value, 5e-3, torch.zeros_like(value), torch.zeros_like(value)) for value in (w, x)]
    for count in range(1, 41):
        loss = torch.nn.functional.cross_entropy(20 * (rotate(x, h) @ w.T), y)
        adam.step(parameters, torch.autograd.grad(loss, (w, x)), count)
    assert float(x.detach().abs().max()) > 0.01
    assert departure(x.detach()) <= 1e-12


@given(
    st.integers(0, 2**31),
    st.floats(0.1, 100),
    st.floats(-6, 6),
    st.integers(2, 6),
    st.integers(1, 9),
)
def test_the_gradients_of_two_institutions_never_differ_by_more_than_the_bound(
    seed: int, temperature: float, spread: float, classes: int, samples: int
) -> None:
    """|| grad_i - grad_j || <= 2 sqrt(2) tau for any transforms, however ill-conditioned: z has length 1.

    So Theorem 1's 2 tau (kappa_i + kappa_j), at best 4 tau, is never reached and says nothing of FEDOT in particular.
    """
    made = strategy("fedlt", classes=[f"c{n}" for n in range(classes)], dimension=8, temperature=temperature)
    method, rng = stepwise(made), torch.Generator().manual_seed(seed)
    classifier = torch.randn(classes, 8, generator=rng, dtype=torch.float64) * 10.0 ** (spread / 3)

    def gradient() -> Tensor:
        u, _, v = torch.linalg.svd(torch.randn(8, 8, generator=rng, dtype=torch.float64))
        scales = torch.logspace(0, spread, 8, dtype=torch.float64)  # a condition number of up to a million
        h = torch.nn.functional.normalize(torch.randn(samples, 8, generator=rng, dtype=torch.float64))
        y = torch.randint(0, classes, (samples,), generator=rng)
        w = classifier.clone().requires_grad_()
        logits = method.logits({"classifier": w, "transform": u @ torch.diag(scales) @ v}, h)
        found: Tensor = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, y), w)[0]
        return found

    difference = float(torch.linalg.norm(gradient() - gradient()))
    assert difference <= 2 * math.sqrt(2) * temperature * (1 + 1e-9)


def test_a_gradient_reaches_its_half_of_the_bound() -> None:
    """An institution that is wrong with all its weight: sqrt(2) tau is the best constant."""
    made = strategy("fedot", transform="identity", classes=["a", "b"], dimension=2, temperature=20.0)
    w = torch.tensor([[50.0, 0.0], [-50.0, 0.0]], dtype=torch.float64, requires_grad=True)
    logits = stepwise(made).logits({"classifier": w}, torch.tensor([[1.0, 0.0]], dtype=torch.float64))
    (gradient,) = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, torch.tensor([1])), w)
    assert float(torch.linalg.norm(gradient)) == pytest.approx(math.sqrt(2) * 20)
