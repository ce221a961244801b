"""DP-SGD of FEDOT against gradients of single samples, and what institutions of private jobs send."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from client_agent.privacy.gaussian import seeded
from client_agent.privacy.mechanisms import Noise
from client_agent.trainers import Trains, method_for, trainer_for
from client_agent.trainers.cayley import rotate
from client_agent.trainers.private import SampleTrainer, clipped_sum
from veilfed.jobs import FedotStrategy, Privacy, SamplePrivacy, UpdatePrivacy
from veilfed.wire.tensors import Arrays

D, K, BLOCKS, TAU = 12, 3, 3, 5.0


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def reference(w: Any, x: Any, h: Any, labels: Any, clip: float) -> list[Any]:
    """The sum of clipped gradients, one sample and one call of autograd at a time."""
    total = [torch.zeros_like(tensor) for tensor in (w, x) if tensor is not None]
    for row, label in zip(h, labels, strict=True):
        values = [tensor.clone().requires_grad_() for tensor in (w, x) if tensor is not None]
        z = row[None] if x is None else rotate(values[1], row[None])
        loss = torch.nn.functional.cross_entropy(TAU * z @ values[0].T, label[None])
        gradients = torch.autograd.grad(loss, values)
        norm = torch.sqrt(torch.stack([gradient.square().sum() for gradient in gradients]).sum())
        factor = min(1.0, clip / float(norm))
        total = [sums + factor * gradient for sums, gradient in zip(total, gradients, strict=True)]
    return total


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 6), st.integers(0, 2**31 - 1), st.sampled_from([1, BLOCKS, D]), st.booleans(), st.floats(0.01, 20)
)
def test_the_sum_of_clipped_gradients_is_that_of_single_samples(
    samples: int, seed: int, blocks: int, transform: bool, clip: float
) -> None:
    random = torch.Generator().manual_seed(seed)
    w = torch.randn(K, D, generator=random, dtype=torch.float64)
    side = D // blocks
    x = torch.randn(blocks, side, side, generator=random, dtype=torch.float64) if transform else None
    h = torch.randn(samples, D, generator=random, dtype=torch.float64)
    h /= torch.linalg.vector_norm(h, dim=1, keepdim=True)
    labels = torch.randint(0, K, (samples,), generator=random)
    found, wanted = clipped_sum(w, x, h, labels, TAU, clip), reference(w, x, h, labels, clip)
    assert len(found) == len(wanted)
    for ours, plain in zip(found, wanted, strict=True):
        assert torch.allclose(ours, plain, rtol=1e-9, atol=1e-9 * clip)
    if samples == 1:
        assert float(torch.sqrt(torch.stack([part.square().sum() for part in found]).sum())) <= clip * (1 + 1e-12)


def data(samples: int = 60, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, K, samples)
    centres = 3 * rng.standard_normal((K, D))
    return (centres[labels] + rng.standard_normal((samples, D))).astype(np.float32), labels.astype(np.int64)


def made(privacy: Privacy | None, seed: int = 0, **strategy: Any) -> tuple[Trains, Any]:
    values = {"name": "fedot", "classes": ["a", "b", "c"], "dimension": D, "blocks": BLOCKS, **strategy}
    method = method_for(FedotStrategy.model_validate(values))
    noise = None if privacy is None else Noise(privacy, source=seeded(seed))
    return trainer_for(method, *data(), seed=1, institution="north", rounds=1, noise=noise), method


def start() -> Arrays:
    return {"classifier": np.random.default_rng(1).standard_normal((K, D)).astype(np.float32) * np.float32(0.1)}


def change(update: Arrays) -> Any:
    return np.subtract(update["classifier"], start()["classifier"], dtype=np.float64)


def trained(trainer: Trains, rounds: int = 1) -> tuple[Arrays, Any]:
    model = start()
    state = trainer.initial_state(model)
    for number in range(rounds):
        model, state = trainer.train(model, state, number)
    return model, state


def test_without_noise_worth_speaking_of_it_learns() -> None:
    privacy = SamplePrivacy(mode="sample", noise_multiplier=1e-3, clip=1.0, sampling_rate=0.25)
    trainer, method = made(privacy, classifier_rate=0.05, transform_rate=0.01, epochs=5)
    model, state = trained(trainer, 3)
    assert isinstance(trainer, SampleTrainer)
    assert state.steps == 3 * 20
    right, of = method.evaluate(model, state, *data())
    assert right / of > 0.9
    assert method.condition_number(model, state) == pytest.approx(1, abs=1e-5)


def test_a_step_moves_by_the_noise_alone_where_the_noise_is_large() -> None:
    """Both the transform of an institution and what it sends."""
    privacy = SamplePrivacy(mode="sample", noise_multiplier=1000.0, clip=1.0, sampling_rate=1.0)
    one, other = (trained(made(privacy, seed)[0]) for seed in (3, 4))
    # Adam's first step is rate x sign: half of the signs of two noises differ.
    for ours, theirs, steady in (
        (change(one[0]), change(other[0]), K * D),
        (one[1].tensors["transform"], other[1].tensors["transform"], D * (D // BLOCKS - 1)),
    ):
        assert 0.2 < (np.sign(ours) != np.sign(theirs)).sum() / steady < 0.8


def test_samples_take_part_by_themselves() -> None:
    privacy = SamplePrivacy(mode="sample", noise_multiplier=1.0, clip=1.0, sampling_rate=0.05)
    trainer, _ = made(privacy, epochs=100)
    assert isinstance(trainer, SampleTrainer)
    batches = list(trainer._batches(0))
    assert len(batches) == 2000
    counts = np.bincount(torch.cat(batches).numpy(), minlength=60)
    assert abs(counts.mean() - 100) < 5
    assert 5 < counts.std() < 15
    assert any(len(batch) == 0 for batch in batches)
    sizes = np.array([len(batch) for batch in batches])
    assert sizes.var() == pytest.approx(60 * 0.05 * 0.95, rel=0.2)


def test_a_step_without_samples_is_a_step_of_noise() -> None:
    trainer, _ = made(SamplePrivacy(mode="sample", noise_multiplier=1.0, clip=1.0, sampling_rate=0.02))
    model, state = trained(trainer)
    assert state.steps == 50
    assert (model["classifier"] != start()["classifier"]).all()


def test_an_update_is_the_plain_one_clipped_and_noised_and_the_state_stays() -> None:
    plain, state = trained(made(None)[0])
    privacy = UpdatePrivacy(mode="update", noise_multiplier=1e-6, clip=0.02)
    noised, kept = trained(made(privacy)[0])
    moved = change(plain)
    assert np.linalg.norm(moved) > 0.02
    wanted = np.add(start()["classifier"], moved * 0.02 / np.linalg.norm(moved), dtype=np.float64)
    assert np.allclose(noised["classifier"], wanted, atol=1e-6)
    assert kept.to_bytes() == state.to_bytes()
