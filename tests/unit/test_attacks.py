"""Attacks on what leaves an institution, with what protects and without: each is carried out and measured.

The attackers see what the aggregator sees, or what it publishes, of the real trainers and strategies; seeds are fixed.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from aggregator.strategies import strategy_for
from client_agent.privacy.gaussian import seeded
from client_agent.privacy.mechanisms import Noise
from client_agent.trainers import method_for, trainer_for
from tests.support.masking import Room
from veilfed import triangle, wide_ring
from veilfed.jobs import JobSpec
from veilfed.privacy import epsilon
from veilfed.secagg import Format
from veilfed.wire.tensors import Arrays

D, K = 48, 3
DELTA = 1e-5
CLASSES = ["a", "b", "c"]
# Of epsilon about 1 at DELTA, for one release.
Z = 4.1


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def embeddings(count: int, seed: int) -> Any:
    """Rows of length 1 with a few strong directions, as a foundation model's are."""
    rng = np.random.default_rng(seed)
    directions = np.random.default_rng(7).standard_normal((D, D)) * np.geomspace(1, 0.1, D)
    rows = rng.standard_normal((count, D)) @ directions
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def job(strategy: dict[str, Any], privacy: dict[str, Any] | None, train: list[str]) -> JobSpec:
    document = {
        "name": "attacked",
        "strategy": {"classes": CLASSES, "dimension": D, **strategy},
        "cohort": {"train": train},
        "rounds": 1,
        "quorum": 1,
        "privacy": privacy,
    }
    return JobSpec.model_validate(document)


def sent(spec: JobSpec, features: Any, labels: Any, model: Arrays, seed: int = 0, least: int = 1) -> Arrays:
    """What an institution sends in the first round."""
    noise = None if spec.privacy is None else Noise(spec.privacy, spec.fold.fraction_bits, source=seeded(seed))
    method = method_for(spec.strategy)
    trainer = trainer_for(
        method, features, labels, seed=seed, institution="north", rounds=1, min_class_samples=least, noise=noise
    )
    return trainer.train(model, trainer.initial_state(model), 0)[0]


# The only sample of a class is its column of C.

ALONE = 2  # the class of one sample


def of_one_sample() -> tuple[Any, Any]:
    features = embeddings(41, 1)
    return features, np.array([*[0, 1] * 20, ALONE], np.int64)


def recognised(seen: Any) -> tuple[float, int]:
    """The cosine of what is seen with the sample, and its place among 1,000 candidates by that (0: recognised)."""
    features, _ = of_one_sample()
    candidates = np.vstack([features[-1:], embeddings(999, 2)]).astype(np.float64)
    cosines = candidates @ seen / max(float(np.linalg.norm(seen)), 1e-30)
    return float(cosines[0]), int((cosines > cosines[0]).sum())


def statistics_job(noise_multiplier: float | None = None) -> JobSpec:
    privacy = None if noise_multiplier is None else {"mode": "statistics", "noise_multiplier": noise_multiplier}
    return job({"name": "afl"}, privacy, ["north", "south", "west"])


def test_without_protection_a_class_of_one_sample_is_its_embedding() -> None:
    features, labels = of_one_sample()
    cosine, place = recognised(sent(statistics_job(), features, labels, {})["cross"][:, ALONE])
    assert cosine > 1 - 1e-6
    assert place == 0


def test_the_policy_leaves_the_class_out() -> None:
    features, labels = of_one_sample()
    update = sent(statistics_job(), features, labels, {}, least=5)
    assert not update["cross"][:, ALONE].any()
    assert np.asarray(update["counts"]).tolist() == [20, 20, 0]


def test_with_noise_the_sample_is_not_recognised() -> None:
    features, labels = of_one_sample()
    found = [recognised(sent(statistics_job(Z), features, labels, {}, seed)["cross"][:, ALONE]) for seed in range(40)]
    # Of an attacker who guesses the places have mean 500 and deviation 289 / sqrt(40) = 46.
    assert np.mean([place for _, place in found]) > 500 - 3 * 46
    assert np.mean([place == 0 for _, place in found]) < 0.1
    assert abs(np.mean([cosine for cosine, _ in found])) < 0.25


def test_under_secure_aggregation_what_arrives_is_uniform() -> None:
    """The masked column is nothing, and the sum over three institutions is all that is learned."""
    form = Format(narrow=0, wide=D)
    columns = {}
    for place, name in enumerate(("north", "south", "west")):
        features, labels = of_one_sample() if name == "north" else (embeddings(40, 5 + place), np.full(40, ALONE))
        column = np.asarray(sent(statistics_job(), features, labels, {})["cross"][:, ALONE], np.float64)
        columns[name] = column
    vectors = {name: wide_ring.encode(column).reshape(-1) for name, column in columns.items()}
    room = Room(sorted(columns), vectors, form)
    room.advertise()
    room.share()
    seen = room.client("north").mask(room.server.request("north"), vectors["north"])  # type: ignore[arg-type]
    cosine, place = recognised(wide_ring.decode(seen.reshape(2, D)))
    assert abs(cosine) < 0.6
    assert place > 10
    high = seen.reshape(2, D)[1] / 2.0**64
    assert 0.25 < high.mean() < 0.75
    room.mask()
    room.confirm()
    room.reveal()
    room.server.unmask(room.total)
    total = wide_ring.decode(room.total.reshape(2, D))
    assert np.allclose(total, sum(columns.values()), atol=1e-12)
    # With 80 other samples in the sum the one is hidden among them, not protected: that is what noise is for.
    assert recognised(total)[1] > 0


# Membership: was this sample trained on?

MEMBERS = 12
TRIALS = 24


def scores(model: Arrays, update: Arrays, features: Any, labels: Any) -> Any:
    """How much the update is along the descent of each sample's loss: large for those it was made of."""
    h = features.astype(np.float64)
    start = np.asarray(model["classifier"], np.float64)
    logits = 20.0 * h @ start.T
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    shares[np.arange(len(h)), labels] -= 1
    change = np.subtract(update["classifier"], start, dtype=np.float64)
    return -np.einsum("nk,kd,nd->n", shares, change, h)


def advantage(spec: JobSpec) -> tuple[float, float]:
    """(the attacker's advantage, its standard deviation): right guesses about members less wrong ones about others.

    The threshold is the one that is best on half of the trials, and the advantage is that on the other half. Labels
    are random, so that there is nothing to learn but the samples themselves.
    """
    inside, outside = [], []
    for trial in range(TRIALS):
        rng = np.random.default_rng(trial)
        features, labels = embeddings(2 * MEMBERS, 100 + trial), rng.integers(0, K, 2 * MEMBERS)
        model: Arrays = {"classifier": (0.005 * rng.standard_normal((K, D))).astype(np.float32)}
        update = sent(spec, features[:MEMBERS], labels[:MEMBERS], model, trial)
        found = scores(model, update, features, labels)
        inside.append(found[:MEMBERS])
        outside.append(found[MEMBERS:])
    known_in, known_out = np.concatenate(inside[::2]), np.concatenate(outside[::2])
    new_in, new_out = np.concatenate(inside[1::2]), np.concatenate(outside[1::2])
    candidates = np.concatenate([known_in, known_out])
    best = max(candidates, key=lambda cut: float((known_in >= cut).mean() - (known_out >= cut).mean()))
    return float((new_in >= best).mean() - (new_out >= best).mean()), math.sqrt(0.5 / len(new_in))


FEDOT = {"name": "fedot", "blocks": 4, "batch_size": 4, "epochs": 5, "classifier_rate": 0.01}
PROTECTED = {
    "update": {"mode": "update", "noise_multiplier": Z, "clip": 0.2},
    "sample": {"mode": "sample", "noise_multiplier": 6.0, "clip": 1.0, "sampling_rate": 0.25},
}


def test_without_noise_members_are_told_from_others() -> None:
    found, deviation = advantage(job(FEDOT, None, ["north"]))
    assert found > 0.6 + deviation


@pytest.mark.parametrize("mode", PROTECTED)
def test_with_noise_the_advantage_is_below_what_epsilon_allows(mode: str) -> None:
    """(e^epsilon - 1 + 2 delta) / (e^epsilon + 1) bounds every attack (Humphries et al., 2023)."""
    spec = job(FEDOT, PROTECTED[mode], ["north"])
    assert spec.release is not None
    spent = epsilon([spec.release], DELTA)
    bound = (math.exp(spent) - 1 + 2 * DELTA) / (math.exp(spent) + 1)
    found, deviation = advantage(spec)
    assert bound < 0.6  # so this attack, without noise, does what the bound excludes
    assert found < bound + 3 * deviation
    assert found < 0.2


# An institution leaves: what the models before and after tell about it.

OTHERS = 120
GUESSES = 200


def published(noise_multiplier: float | None, seed: int = 0) -> tuple[list[Any], list[Arrays], Any, Any]:
    """The classifiers before and after, what all institutions sent, and the sample of the one that leaves."""
    spec = statistics_job(noise_multiplier)
    strategy = strategy_for(spec)
    rng = np.random.default_rng(seed)
    updates = [
        sent(spec, embeddings(OTHERS, 1000 * seed + place), rng.integers(0, K, OTHERS), {}, 10 * seed + place)
        for place in (1, 2)
    ]
    leaving = embeddings(1, 1000 * seed + 3), np.array([0])
    updates.append(sent(spec, *leaving, {}, 10 * seed + 3))
    models = [
        np.asarray(strategy.fold([(1.0, update) for update in some], dict)["classifier"], np.float64)
        for some in (updates, updates[:2])
    ]
    return models, updates, leaving[0][0].astype(np.float64), embeddings(GUESSES - 1, 1000 * seed + 4)


def told_to_insiders(models: list[Any], updates: list[Arrays]) -> Any:
    """(R + lambda I) W - C of the others, at W before: the sample times its residual, to who knows the others' sums.

    With R' = R + h h^T and C' = C + h y^T: (R' + lambda I) W = C', so it is h (y - W^T h)^T.
    """
    gram = sum(triangle.unpack(update["gram"]) for update in updates[:2]) + np.eye(D)
    cross = sum(np.asarray(update["cross"], np.float64) for update in updates[:2])
    return np.linalg.svd(gram @ models[0].T - cross)[0][:, 0]


def told_to_outsiders(models: list[Any], updates: list[Arrays]) -> Any:
    """The same from the difference of the models, with R of samples that anybody may have."""
    public = embeddings(2000, 99).astype(np.float64)
    gram = 2 * OTHERS * public.T @ public / len(public) + np.eye(D)
    return np.linalg.svd(gram @ (models[0] - models[1]).T)[0][:, 0]


def place(direction: Any, sample: Any, guesses: Any) -> int:
    """Where the sample is among guesses, by the cosine with what was found, whose sign is not known."""
    cosines = np.abs(np.vstack([sample, guesses]) @ direction)
    return int((cosines > cosines[0]).sum())


def places(attack: Callable[[list[Any], list[Arrays]], Any], noise_multiplier: float | None) -> Any:
    found = []
    for seed in range(12):
        models, updates, sample, guesses = published(noise_multiplier, seed)
        found.append(place(attack(models, updates), sample, guesses))
    return np.array(found)


@pytest.mark.parametrize("attack", [told_to_insiders, told_to_outsiders])
def test_two_publications_tell_the_sample_of_who_left(attack: Any) -> None:
    """To those who together know the other institutions' sums exactly, and nearly to anybody."""
    found = places(attack, None)
    assert (found == 0).mean() == 1 if attack is told_to_insiders else (found < 0.05 * GUESSES).mean() > 0.5


@pytest.mark.parametrize("attack", [told_to_insiders, told_to_outsiders])
def test_with_noise_they_do_not(attack: Any) -> None:
    """The places of guesses have mean 100 and deviation 58 / sqrt(12) = 17."""
    found = places(attack, Z)
    assert found.mean() > GUESSES / 2 - 3 * 17
    assert (found == 0).mean() < 0.2
