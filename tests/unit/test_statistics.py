"""Statistics: what an institution sums, what the aggregator's gate takes, and the packed triangle between them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from client_agent.trainers import method_for, trainer_for
from client_agent.trainers.statistics import Statistics, released
from tests.support.analytic import analytic, normalised, pool, sums
from veilfed import triangle
from veilfed.errors import Code, VeilfedError
from veilfed.jobs import AflStrategy
from veilfed.updates import MAX_SAMPLES, check_statistics
from veilfed.wire.tensors import Arrays, map_bytes

D, K = 10, 3


def _spec() -> AflStrategy:
    spec = analytic(D, K).spec.strategy
    assert isinstance(spec, AflStrategy)
    return spec


SPEC = _spec()


@settings(max_examples=30)
@given(st.integers(1, 40), st.integers(0, 99))
def test_a_triangle_is_the_whole_matrix(dimension: int, seed: int) -> None:
    half = np.random.default_rng(seed).standard_normal((dimension, dimension))
    matrix = half + half.T
    packed = triangle.pack(matrix)
    np.testing.assert_array_equal(packed, matrix[np.triu_indices(dimension)])
    np.testing.assert_array_equal(triangle.unpack(packed), matrix)
    np.testing.assert_array_equal(triangle.diagonal(packed), np.diag(matrix))


def test_not_every_length_is_a_triangle() -> None:
    with pytest.raises(VeilfedError, match="not a triangle"):
        triangle.unpack(np.zeros(5))


def test_the_sums_are_those_of_the_formula() -> None:
    features, labels = pool(60, D, K)
    (arrays,) = sums((features, labels), D, K, [np.arange(60)])
    h, y = normalised(features), np.eye(K)[labels]
    np.testing.assert_allclose(triangle.unpack(np.asarray(arrays["gram"], np.float64)), h.T @ h, rtol=1e-12)
    np.testing.assert_allclose(np.asarray(arrays["cross"], np.float64), h.T @ y, atol=1e-12)
    np.testing.assert_array_equal(arrays["counts"], y.sum(axis=0))
    assert {name: (array.shape, array.dtype) for name, array in arrays.items()} == {
        name: (shape, SPEC.dtype(name)) for name, shape in SPEC.update_shapes.items()
    }
    check_statistics(arrays, SPEC)


def test_batches_make_no_difference_but_rounding() -> None:
    features, labels = pool(60, D, K)
    (whole,) = sums((features, labels), D, K, [np.arange(60)])
    batched = Statistics(D, K)
    for rows in np.array_split(np.arange(60), 7):
        batched.add(features[rows], labels[rows])
    batched.add(features[:0], labels[:0])
    for name, array in batched.arrays().items():
        np.testing.assert_allclose(np.asarray(array, np.float64), np.asarray(whole[name], np.float64), atol=1e-12)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f, y: (f[:, 1:], y), "the job needs"),
        (lambda f, y: (f * 0, y), "zero or not finite"),
        (lambda f, y: (f * np.float32(np.nan), y), "zero or not finite"),
        (lambda f, y: (f, y + K), "labels must be"),
        (lambda f, y: (f, y[1:]), "int64 are needed"),
    ],
)
def test_samples_that_do_not_fit_are_refused(change: Callable[..., Any], words: str) -> None:
    statistics = Statistics(D, K)
    with pytest.raises(VeilfedError, match=words) as refused:
        statistics.add(*change(*pool(5, D, K)))
    assert refused.value.code is Code.DATA_INVALID
    assert not any(array.any() for array in statistics.arrays().values())


# What an institution's policy leaves out.


def trained(features: Any, labels: Any, **limits: Any) -> Arrays:
    trainer = trainer_for(method_for(SPEC), features, labels, seed=1, institution="one", rounds=1, **limits)
    update, state = trainer.train({}, trainer.initial_state({}), 0)
    assert state is None
    return update


def test_classes_of_few_samples_are_left_out_as_if_they_were_not_there() -> None:
    features, labels = pool(60, D, K)
    rare = np.flatnonzero(labels == 1)[4:]
    kept = np.setdiff1d(np.arange(60), rare)
    assert (released(labels[kept], K, 4) == np.arange(len(kept))).all()
    others = kept[labels[kept] != 1]
    told = trained(features[kept], labels[kept], min_class_samples=5)
    assert map_bytes(told) == map_bytes(trained(features[others], labels[others], min_class_samples=5))
    assert np.asarray(told["counts"])[1] == 0
    check_statistics(told, SPEC)


def test_few_samples_in_all_are_not_told_about() -> None:
    features, labels = pool(19, D, K)
    told = trained(features, labels, min_class_samples=1, min_samples=20)
    assert not any(array.any() for array in told.values())
    check_statistics(told, SPEC)
    assert trained(features, labels, min_class_samples=1, min_samples=19)["counts"].any()


def test_sums_stop_when_they_are_cancelled() -> None:
    trainer = trainer_for(method_for(SPEC), *pool(50, D, K), seed=1, institution="one", rounds=1)
    with pytest.raises(VeilfedError) as stopped:
        trainer.train({}, None, 0, lambda: True)
    assert stopped.value.code is Code.CANCELLED


def test_a_class_without_weights_is_never_the_answer() -> None:
    method = method_for(SPEC)
    features, _ = pool(50, D, K)
    weights = np.full((K, D), 0.0)
    weights[0] = -normalised(features).mean(axis=0)
    found = method.probabilities({"classifier": weights}, None, features)
    np.testing.assert_allclose(found, np.tile([1.0, 0.0, 0.0], (50, 1)))
    np.testing.assert_allclose(method.probabilities({"classifier": 0 * weights}, None, features), 1 / K)


# The update gate.


def poisoned(change: Callable[[dict[str, Any]], None]) -> Arrays:
    (arrays,) = sums(pool(60, D, K), D, K, [np.arange(60)])
    spoiled: dict[str, Any] = {name: np.array(array) for name, array in arrays.items()}
    change(spoiled)
    return spoiled


def negative_direction(update: dict[str, Any]) -> None:
    """The trace stays; an eigenvalue becomes negative."""
    matrix = triangle.unpack(update["gram"])
    values, vectors = np.linalg.eigh(matrix)
    taken = 2 * values[0]
    matrix += taken * (np.outer(vectors[:, 1], vectors[:, 1]) - np.outer(vectors[:, 0], vectors[:, 0]))
    update["gram"][:] = triangle.pack(matrix)


def all_of_one_class(update: dict[str, Any]) -> None:
    update["counts"][:] = [update["counts"].sum(), 0, 0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda u: u.pop("counts"), "expected the tensors"),
        (lambda u: u.update(extra=u["cross"]), "expected the tensors"),
        (lambda u: u.update(gram=u["gram"][1:]), "gram: expected shape"),
        (lambda u: u.update(cross=u["cross"].T.copy()), "cross: expected shape"),
        (lambda u: u.update(gram=u["gram"].astype(np.float32)), "gram: expected float64"),
        (lambda u: u.update(counts=u["counts"].astype(np.float64)), "counts: expected int64"),
        (lambda u: u["gram"].__setitem__(3, np.nan), "gram: not all elements are finite"),
        (lambda u: u["cross"].__setitem__((1, 1), np.inf), "cross: not all elements are finite"),
        (lambda u: u["counts"].__setitem__(0, -1), "counts: negative"),
        (lambda u: u["counts"].__setitem__(0, MAX_SAMPLES + 1), "counts: negative, or more than"),
        (lambda u: u["counts"].fill(2**62), "counts: negative, or more than"),
        (lambda u: u["counts"].__setitem__(0, u["counts"][0] + 1), "the trace"),
        (lambda u: u["gram"].__imul__(2), "the trace"),
        (lambda u: u["gram"].__setitem__(1, 1e30), "larger than such sums"),
        (lambda u: u["gram"].__setitem__(1, 1e3), "an eigenvalue is negative"),
        (negative_direction, "an eigenvalue is negative"),
        (lambda u: u["cross"].__imul__(10), "an eigenvalue is negative"),
        (lambda u: u["cross"].__setitem__((0, 0), 1e6), "an eigenvalue is negative"),
        (all_of_one_class, "without samples has a sum"),
    ],
)
def test_sums_that_cannot_be_of_samples_are_refused(change: Callable[[dict[str, Any]], None], words: str) -> None:
    with pytest.raises(VeilfedError, match=words) as refused:
        analytic(D, K).check(poisoned(change), 0)
    assert refused.value.code is Code.UPDATE_INVALID


@settings(max_examples=30)
@given(st.integers(0, 300), st.integers(0, 99))
def test_sums_of_samples_pass(samples: int, seed: int) -> None:
    (arrays,) = sums(pool(samples, D, K, seed), D, K, [np.arange(samples)])
    check_statistics(arrays, SPEC)


def test_nothing_counted_means_nothing_summed() -> None:
    def off_diagonal(update: dict[str, Any]) -> None:
        update["counts"].fill(0)
        update["cross"].fill(0)
        update["gram"].fill(0)
        update["gram"][1] = 1e-3

    with pytest.raises(VeilfedError, match="no samples, but a sum"):
        check_statistics(poisoned(off_diagonal), SPEC)
