"""AFL and FedCGS from statistics: equal to the solution on all samples at once, for any partition and order."""

import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from aggregator.solve import pairwise
from aggregator.solve.cholesky import Cholesky, shifted
from aggregator.solve.gaussian import oas, solve_gaussian
from aggregator.solve.ridge import Spectrum
from aggregator.solve.statistics import Statistics
from tests.support.analytic import analytic, difference, normalised, pool, ridge, sums
from veilfed.errors import Code, VeilfedError
from veilfed.wire.tensors import Arrays, map_bytes, parse_map

EPS = float(np.finfo(np.float64).eps)
K = 4


def fold(coordinator: Any, updates: list[Arrays]) -> Arrays:
    folded: Arrays = coordinator.fold(((1.0, update) for update in updates), dict)
    return folded


def floats(array: Any) -> NDArray[np.float64]:
    return np.asarray(array, np.float64)


@st.composite
def partitions(draw: st.DrawFn) -> tuple[int, int, list[list[int]]]:
    """(dimension, seed, the rows of each institution): some are empty, some may have one class."""
    dimension = draw(st.integers(2, 24))
    clients = draw(st.integers(1, 200))
    seed = draw(st.integers(0, 2**16))
    rng = np.random.default_rng(seed)
    samples = pool(draw(st.integers(20, 120)), dimension, K, seed)
    owners = rng.integers(0, clients, len(samples[1]))
    if draw(st.booleans()):
        owners = samples[1] % clients  # an institution for a class
    order = rng.permutation(clients)
    return dimension, seed, [np.flatnonzero(owners == client).tolist() for client in order]


@settings(max_examples=60)
@given(partitions(), st.sampled_from([1e-6, 1e-3, 1.0, 100.0]))
def test_afl_is_the_ridge_regression_on_all_samples(partition: tuple[int, int, list[list[int]]], shift: float) -> None:
    dimension, seed, parts = partition
    samples = pool(sum(len(part) for part in parts), dimension, K, seed)
    updates = sums(samples, dimension, K, [np.array(part, np.intp) for part in parts])
    found = fold(analytic(dimension, K, ridge=shift), updates)["classifier"]
    expected, condition = ridge(samples, K, shift)
    assert difference(found, expected) <= max(1e-10, 100 * EPS * condition)
    reverse = fold(analytic(dimension, K, ridge=shift), updates[::-1])["classifier"]
    assert np.asarray(reverse).tobytes() == np.asarray(found).tobytes()


@settings(max_examples=30)
@given(
    st.permutations(range(12)),
    st.sampled_from([{"ridge": 0.1}, {"ridge": "gcv"}, {"name": "fedcgs"}]),
    st.integers(0, 100),
)
def test_every_order_gives_the_same_bytes(order: list[int], strategy: dict[str, Any], seed: int) -> None:
    samples = pool(150, 16, K, seed)
    updates = sums(samples, 16, K, np.array_split(np.arange(150), 12))
    coordinator = analytic(16, K, **strategy)
    assert map_bytes(fold(coordinator, [updates[at] for at in order])) == map_bytes(fold(coordinator, updates))


@settings(max_examples=40)
@given(partitions(), st.sampled_from([1e-2, 0.1, 1.0]), st.sampled_from([0.0, 0.5]))
def test_the_pairwise_law_gives_the_same_classifier(
    partition: tuple[int, int, list[list[int]]], gamma: float, shift: float
) -> None:
    """Empty institutions and those with fewer samples than dimensions need the intermediary; together they do not."""
    dimension, seed, parts = partition
    samples = pool(sum(len(part) for part in parts) + 4 * dimension, dimension, K, seed)
    parts = [*parts, list(range(sum(len(part) for part in parts), len(samples[1])))]
    updates = sums(samples, dimension, K, [np.array(part, np.intp) for part in parts])
    locals_ = [pairwise.local(Statistics.of(update), gamma) for update in updates]
    found = pairwise.without_intermediary(pairwise.merge(locals_), gamma, shift).T
    expected, condition = ridge(samples, K, shift)
    tolerance = max(1e-8, 1e4 * EPS * condition)
    assert difference(found, expected) <= tolerance
    assert difference(found, floats(fold(analytic(dimension, K, ridge=shift), updates)["classifier"])) <= tolerance


@settings(max_examples=30)
@given(partitions(), st.sampled_from(["afl", "fedcgs"]), st.integers(0, 2**16))
def test_leaving_one_out_is_never_having_had_it(
    partition: tuple[int, int, list[list[int]]], name: str, choice: int
) -> None:
    """The bytes are those of a job that it was never in, and the solution that of the others' samples."""
    dimension, seed, parts = partition
    samples = pool(sum(len(part) for part in parts) + 40, dimension, K, seed)
    parts = [*parts, list(range(sum(len(part) for part in parts), len(samples[1])))]  # one that stays
    updates = sums(samples, dimension, K, [np.array(part, np.intp) for part in parts])
    gone = choice % (len(parts) - 1) if len(parts) > 1 else None
    left = [number for number in range(len(parts)) if number != gone]
    coordinator = analytic(dimension, K, name=name)
    fold(coordinator, updates)
    without = fold(coordinator, [updates[number] for number in left])
    assert map_bytes(without) == map_bytes(fold(analytic(dimension, K, name=name), [updates[at] for at in left]))
    if name == "afl":
        rows = np.array([row for number in left for row in parts[number]], np.intp)
        expected, condition = ridge((samples[0][rows], samples[1][rows]), K, 1.0)
        assert difference(without["classifier"], expected) <= max(1e-10, 100 * EPS * condition)


# FedCGS.


def covariances(samples: Any) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """(within classes, of all samples, means [K, d]) in two passes."""
    h, labels = normalised(samples[0]), samples[1]
    means = np.array([h[labels == c].mean(axis=0) for c in range(K)])
    centred = h - means[labels]
    return centred.T @ centred / (len(h) - K), np.cov(h.T), means


@pytest.mark.parametrize("covariance", ["within", "paper"])
@pytest.mark.parametrize("shrinkage", [0.0, 0.3, 1.0, "oas"])
def test_fedcgs_is_the_classifier_of_gaussian_classes(covariance: str, shrinkage: Any) -> None:
    samples = pool(300, 8, K)
    updates = sums(samples, 8, K, np.array_split(np.arange(300), 3))
    model = fold(analytic(8, K, name="fedcgs", covariance=covariance, shrinkage=shrinkage), updates)
    within, total, means = covariances(samples)
    sigma = within if covariance == "within" else total
    rho = oas(sigma, 300 - K if covariance == "within" else 299) if shrinkage == "oas" else shrinkage
    sigma = (1 - rho) * sigma + rho * np.trace(sigma) / 8 * np.eye(8)
    weights = np.linalg.solve(sigma, means.T).T
    priors = np.log(np.bincount(samples[1]) / 300)
    assert difference(model["classifier"], weights) < 1e-9
    assert difference(model["bias"], priors - (weights * means).sum(axis=1) / 2) < 1e-9


def test_the_estimated_shrinkage_falls_with_the_samples() -> None:
    rng = np.random.default_rng(0)
    scale = np.linspace(0.1, 3, 30)
    found = [oas(np.cov((rng.standard_normal((n, 30)) * scale).T), n) for n in (20, 100, 1000, 100_000)]
    assert found == sorted(found, reverse=True)
    assert 0 < found[-1] < 0.01 < found[0] <= 1
    assert oas(np.eye(30), 100) == 1.0


@pytest.mark.parametrize("name", ["afl", "fedcgs"])
def test_classes_without_samples_or_with_few_get_no_weights(name: str) -> None:
    features, labels = pool(200, 8, K)
    kept = (labels != 1) & ((labels != 2) | (np.cumsum(labels == 2) <= 4))
    updates = sums((features[kept], labels[kept]), 8, K, np.array_split(np.arange(kept.sum()), 3))
    coordinator = analytic(8, K, name=name, min_class_count=5)
    model, report = coordinator.fold_reported([(f"i{at}", 1.0, update) for at, update in enumerate(updates)], dict)
    weights = floats(model["classifier"])
    assert (weights.any(axis=1) == [True, False, False, True]).all()
    assert report["class_published"] == [True, False, False, True]
    assert report["class_samples"][1:3] == [0, 4]
    # The others are as they would be if few were enough.
    free = fold(analytic(8, K, name=name, min_class_count=1), updates)
    np.testing.assert_array_equal(floats(free["classifier"])[[0, 3]], weights[[0, 3]])


# What is told of a model.


def test_the_report_says_what_everybody_brought() -> None:
    samples = pool(300, 8, K)
    parts = np.split(np.arange(300), [200, 200])  # the second has none
    updates = sums(samples, 8, K, parts)
    coordinator = analytic(8, K, ridge=0.5)
    model, report = coordinator.fold_reported([(f"i{at}", 1.0, update) for at, update in enumerate(updates)], dict)
    assert map_bytes(model) == map_bytes(fold(coordinator, updates))
    assert report["samples"] == 300
    assert report["class_samples"] == np.bincount(samples[1], minlength=K).tolist()
    assert [one["samples"] for one in report["institutions"]] == [200, 0, 100]
    shares = [one["share"] for one in report["institutions"]]
    h = normalised(samples[0])
    hat = np.einsum("ij,ij->i", h, np.linalg.solve(h.T @ h + 0.5 * np.eye(8), h.T).T)  # leverages
    expected = [hat[part].sum() / hat.sum() for part in parts]
    np.testing.assert_allclose(shares, expected, rtol=1e-5)
    assert report["class_institutions"] == [2] * K
    left = np.square(h @ floats(model["classifier"]).T - np.eye(K)[samples[1]]).sum(axis=0)
    np.testing.assert_allclose(report["class_residual"], left / np.bincount(samples[1]), rtol=1e-5)
    assert ridge(samples, K, 0.5)[1] / 10 <= report["condition"] <= ridge(samples, K, 0.5)[1] * (1 + 1e-6)


# lambda afterwards.


def test_cross_validation_is_that_of_the_samples() -> None:
    samples = pool(90, 10, K)
    h, y = normalised(samples[0]), np.eye(K)[samples[1]]
    spectrum = Spectrum(Statistics.of(sums(samples, 10, K, [np.arange(90)])[0]))
    for shift in (1e-3, 0.1, 1.0, 30.0):
        hat = h @ np.linalg.solve(h.T @ h + shift * np.eye(10), h.T)
        residual = float(np.square(y - hat @ y).sum())
        assert spectrum.residual(shift) == pytest.approx(residual, rel=1e-9)
        assert spectrum.degrees(shift) == pytest.approx(float(np.trace(hat)), rel=1e-9)
        expected = residual / 90 / (1 - float(np.trace(hat)) / 90) ** 2
        assert spectrum.gcv(shift) == pytest.approx(expected, rel=1e-9)


def test_the_chosen_ridge_is_the_best_of_a_fine_grid() -> None:
    for seed in range(5):
        samples = pool(60, 20, K, seed)
        updates = sums(samples, 20, K, [np.arange(60)])
        spectrum = Spectrum(Statistics.of(updates[0]))
        best = spectrum.best()
        grid = np.exp(np.linspace(math.log(1e-6), math.log(1e3), 3000))
        assert spectrum.gcv(best) <= min(spectrum.gcv(float(point)) for point in grid) * (1 + 1e-6)
        _, report = analytic(20, K, ridge="gcv").fold_reported([("i0", 1.0, updates[0])], dict)
        assert (report["ridge"], report["chosen_by"]) == (best, "gcv")
        found = fold(analytic(20, K, ridge="gcv"), updates)["classifier"]
        assert difference(found, ridge(samples, K, best)[0]) < 1e-10


# Singular sums.


@pytest.mark.parametrize(
    "strategy",
    [
        {"ridge": 0.0},
        {"ridge": 1e-17},
        {"name": "fedcgs", "shrinkage": 0.0},
        {"name": "fedcgs", "covariance": "paper", "shrinkage": 0.0},
    ],
)
def test_what_cannot_be_solved_is_a_typed_error(strategy: dict[str, Any]) -> None:
    updates = sums(pool(6, 8, K), 8, K, [np.arange(6)])  # fewer samples than dimensions
    with pytest.raises(VeilfedError, match="is singular") as refused:
        fold(analytic(8, K, **strategy), updates)
    assert refused.value.code is Code.SINGULAR


@pytest.mark.parametrize("strategy", [{}, {"ridge": "gcv"}, {"name": "fedcgs"}])
def test_no_samples_at_all(strategy: dict[str, Any]) -> None:
    updates = sums(pool(6, 8, K), 8, K, [np.arange(0)])
    with pytest.raises(VeilfedError, match="sample") as refused:
        fold(analytic(8, K, **strategy), updates)
    assert refused.value.code is Code.SINGULAR


@settings(max_examples=40)
@given(st.integers(1, 150), st.integers(0, 1000), st.floats(0, 8))
def test_factors_solve_and_estimate_the_condition(dimension: int, seed: int, decades: float) -> None:
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(rng.standard_normal((dimension, dimension)))[0]
    matrix = (basis * np.logspace(0, decades, dimension)) @ basis.T
    matrix = (matrix + matrix.T) / 2
    factors = Cholesky(matrix, "the matrix")
    right = rng.standard_normal((dimension, 3))
    exact = float(np.linalg.cond(matrix, 1))
    assert difference(factors.solve(right), np.linalg.solve(matrix, right)) <= 100 * EPS * exact
    # An estimate from below, seldom far off.
    assert exact / 10 <= factors.condition <= exact * (1 + 1e-6)


def test_shifted_leaves_its_argument_alone() -> None:
    matrix = np.zeros((3, 3))
    np.testing.assert_array_equal(shifted(matrix, 2.0), 2 * np.eye(3))
    assert not matrix.any()


def test_a_gaussian_of_one_class_has_its_weights() -> None:
    features, labels = pool(50, 6, K)
    update = sums((features, np.zeros_like(labels)), 6, K, [np.arange(50)])[0]
    solution = solve_gaussian(Statistics.of(update), "within", "oas")
    assert solution.weights[:, 0].any()
    assert not solution.weights[:, 1:].any()
    assert not solution.biases[1:].any()


def test_the_memory_of_a_fold_does_not_grow_with_the_institutions() -> None:
    (update,) = sums(pool(200, 64, K), 64, K, [np.arange(200)])
    coordinator, peaks = analytic(64, K), []
    fold(coordinator, [update])
    for count in (2, 40):
        data = [map_bytes(update)] * count
        tracemalloc.start()
        coordinator.fold(((1.0, parse_map(bytes(bytearray(item)))) for item in data), dict)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + len(data[0])
