"""Noisy statistics at the coordinator: what its gate takes, and the models that it makes of them."""

from typing import Any

import numpy as np
import pytest

from aggregator.solve.statistics import positive
from aggregator.strategies import Strategy, strategy_for, with_ridge
from client_agent.privacy.gaussian import seeded
from client_agent.privacy.mechanisms import Noise, PrivateStatistics
from tests.support.analytic import normalised, pool, ridge
from veilfed.errors import Code, VeilfedError
from veilfed.jobs import JobSpec, StatisticsPrivacy
from veilfed.wire.tensors import Arrays

D, K = 10, 3


def coordinator(noise_multiplier: float, **strategy: Any) -> Strategy:
    document = {
        "name": "small",
        "strategy": {"classes": ["a", "b", "c"], "dimension": D, **strategy},
        "cohort": {"train": ["north", "south"]},
        "rounds": 1,
        "quorum": 1,
        "privacy": {"mode": "statistics", "noise_multiplier": noise_multiplier},
    }
    return strategy_for(JobSpec.model_validate(document))


def noisy(noise_multiplier: float, samples: int, seed: int) -> Arrays:
    features, labels = pool(samples, D, K, seed)
    statistics = PrivateStatistics(D, K)
    statistics.add(normalised(features), labels)
    privacy = StatisticsPrivacy(mode="statistics", noise_multiplier=noise_multiplier)
    return statistics.noisy(privacy, Noise(privacy, source=seeded(seed)))


@pytest.mark.parametrize("strategy", [{"name": "afl"}, {"name": "fedcgs"}], ids=lambda strategy: strategy["name"])
@pytest.mark.parametrize("noise_multiplier", [0.1, 5.0, 500.0])
def test_noisy_sums_are_taken_and_solved(strategy: dict[str, Any], noise_multiplier: float) -> None:
    """However large the noise is: there is a model, in which classes of few samples by the noisy counts are empty."""
    made = coordinator(noise_multiplier, **strategy)
    updates = {name: noisy(noise_multiplier, 200, seed) for seed, name in enumerate(("north", "south"))}
    for arrays in updates.values():
        made.check(arrays, 0)
    model, card = made.fold_reported([(name, 1.0, arrays) for name, arrays in updates.items()], dict)
    assert np.isfinite(np.asarray(model["classifier"], np.float64)).all()
    counts = np.maximum(sum(np.asarray(arrays["counts"], np.int64) for arrays in updates.values()), 0)
    assert card["class_samples"] == counts.tolist()
    assert card["class_published"] == (counts >= 5).tolist() == model["classifier"].any(axis=1).tolist()


def test_with_little_noise_it_is_the_regression_on_the_samples() -> None:
    made = coordinator(0.001, name="afl", ridge=1.0)
    found = made.fold([(1.0, noisy(0.001, 200, 0))], dict)["classifier"]
    wanted, _ = ridge(pool(200, D, K, 0), K, 1.0)
    assert np.abs(np.subtract(found, wanted, dtype=np.float64)).max() < 1e-3


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("gram", np.full(D * (D + 1) // 2, np.nan), "not all elements are finite"),
        ("cross", np.full((D, K), 2.0**38), "larger than such sums can be"),
        ("counts", np.array([0, 0, -(2**63)]), "more than"),
        ("counts", np.zeros(K + 1, np.int64), "expected shape"),
    ],
)
def test_what_noise_cannot_explain_is_refused(name: str, value: Any, words: str) -> None:
    with pytest.raises(VeilfedError, match=words) as refused:
        coordinator(1.0, name="afl").check({**noisy(1.0, 50, 0), name: value}, 0)
    assert refused.value.code is Code.UPDATE_INVALID


def test_the_same_sums_are_refused_in_a_job_without_privacy() -> None:
    document = coordinator(1.0, name="afl").spec.model_copy(update={"privacy": None})
    with pytest.raises(VeilfedError):
        strategy_for(document).check(noisy(1.0, 50, 0), 0)


def test_cross_validation_cannot_choose_from_noise() -> None:
    spec = coordinator(1.0, name="afl").spec
    assert with_ridge(spec, "20").spec.strategy.model_dump()["ridge"] == 20
    with pytest.raises(VeilfedError, match="gcv takes noise for samples"):
        with_ridge(spec, "gcv")


def test_the_repaired_matrix_is_the_nearest_without_negative_eigenvalues() -> None:
    rng = np.random.default_rng(0)
    noise = rng.standard_normal((D, D))
    matrix = noise + noise.T
    found = positive(matrix)
    values = np.linalg.eigvalsh(matrix)
    assert np.linalg.eigvalsh(found).min() > -1e-12
    assert np.linalg.norm(found - matrix) == pytest.approx(np.linalg.norm(np.minimum(values, 0)))
    assert np.allclose(positive(found), found)
