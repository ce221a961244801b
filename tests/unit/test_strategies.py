"""Every method at the coordinator, but for the average itself (test_aggregator_fold)."""

import random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from aggregator import gate
from aggregator.strategies import STRATEGIES, Strategy, strategy_for
from aggregator.strategies.fedgh import _gradient, train_header
from tests.support.methods import ANALYTIC, CLASSES, DIMENSION, first_model, job, strategy
from veilfed import updates
from veilfed.errors import Code, VeilfedError
from veilfed.jobs import JobSpec
from veilfed.wire.tensors import Arrays, map_bytes

K = len(CLASSES)
# Methods with FEDOT's first classifier.
TRAINED = [name for name in STRATEGIES if name not in (*ANALYTIC, "blindfed")]


def made(name: str, **changes: Any) -> Strategy:
    return strategy_for(job(strategy(name, **changes)))


def nothing() -> Arrays:
    raise AssertionError("the current model is not needed")


def vectors(seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((K, DIMENSION)).astype(np.float32)


def floats(array: NDArray[Any]) -> NDArray[np.float64]:
    return np.asarray(array, np.float64)


# The first model.


@pytest.mark.parametrize("name", TRAINED)
def test_the_first_model_has_the_shapes_that_the_job_says(name: str) -> None:
    spec = strategy(name)
    model = first_model(spec)
    assert {tensor: array.shape for tensor, array in model.items()} == dict(spec.model_shapes)
    assert {array.dtype for array in model.values()} == {np.dtype(np.float32)}
    assert map_bytes(first_model(spec)) == map_bytes(model)
    np.testing.assert_allclose(np.linalg.norm(np.asarray(model["classifier"]), axis=1), 0.1, rtol=1e-6)
    # The same random classifier for every method: they are compared from the same start.
    np.testing.assert_array_equal(model["classifier"], first_model(strategy("fedot"))["classifier"])
    assert len(map_bytes(model)) <= strategy_for(job(spec)).model_bytes


@pytest.mark.parametrize("name", [*TRAINED, *ANALYTIC])  # masked updates are longer: test_secagg_fold
def test_the_bound_on_a_message_is_close_to_the_longest_one(name: str) -> None:
    spec = strategy(name, dimension=1000)
    longest = max(
        len(map_bytes({tensor: np.zeros(shape, spec.dtype(tensor)) for tensor, shape in shapes.items()}))
        for shapes in (spec.model_shapes, spec.update_shapes)
    )
    slack = 300 * max(len(spec.model_shapes), len(spec.update_shapes))  # names, types and lengths
    assert longest <= strategy_for(job(spec)).model_bytes <= longest + slack


@pytest.mark.parametrize("name", TRAINED)
def test_class_vectors_become_the_first_classifier(name: str) -> None:
    given = vectors()
    first = floats(made(name, initial="class_vectors", init_norm=0.5).initial(given)["classifier"])
    np.testing.assert_allclose(first, 0.5 * given / np.linalg.norm(given, axis=1, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize(
    ("initial", "given", "words"),
    [
        ("class_vectors", None, "needs class vectors"),
        ("random", vectors(), "takes no class vectors"),
        ("class_vectors", vectors()[:2], "expected float32"),
        ("class_vectors", vectors().astype(np.float64), "expected float32"),
        ("class_vectors", vectors() * np.float32(np.nan), "not finite"),
        ("class_vectors", np.zeros((K, DIMENSION), np.float32), "zero"),
    ],
)
def test_class_vectors_that_do_not_fit_the_job(initial: str, given: Any, words: str) -> None:
    with pytest.raises(VeilfedError, match=words) as refused:
        made("fedot", initial=initial).initial(given)
    assert refused.value.code is Code.JOB_INVALID


# Keeping, and averaging of several tensors.


def test_all_local_keeps_the_model_and_takes_no_tensors() -> None:
    coordinator = made("all-local")
    model = coordinator.initial()
    assert coordinator.shapes == {}
    assert map_bytes(coordinator.fold([(0.0, {}), (0.0, {})], lambda: model)) == map_bytes(model)
    spec = job(strategy("all-local"))
    gate.check_weight(0.0, True, spec)
    with pytest.raises(VeilfedError, match="without parameters"):
        gate.check_weight(1.0, True, spec)


@pytest.mark.parametrize("name", ["all-global", "fedclip"])
def test_all_tensors_of_an_update_are_averaged(name: str) -> None:
    coordinator = made(name)
    rng = np.random.default_rng(1)
    updates: list[Arrays] = [
        {tensor: rng.standard_normal(shape).astype(np.float32) for tensor, shape in coordinator.shapes.items()}
        for _ in range(3)
    ]
    folded = coordinator.fold([(1.0, update) for update in updates], nothing)
    assert folded.keys() == updates[0].keys()
    for tensor in folded:
        mean = np.mean([floats(update[tensor]) for update in updates], axis=0)
        np.testing.assert_allclose(floats(folded[tensor]), mean, atol=1e-6)
    backwards = coordinator.fold([(1.0, update) for update in reversed(updates)], nothing)
    assert map_bytes(backwards) == map_bytes(folded)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda u: u.pop("transform"), "expected the tensors"),
        (lambda u: u.update(extra=u["classifier"]), "expected the tensors"),
        (lambda u: u.update(transform=u["transform"][:, :2]), "transform: expected shape"),
        (lambda u: u.update(transform=u["transform"].astype(np.float64)), "transform: expected float32"),
        (lambda u: u["transform"].fill(np.nan), "transform: not all elements are finite"),
        (lambda u: u["transform"].fill(999), "transform: the norm"),
    ],
)
def test_the_gate_looks_at_every_tensor(change: Any, words: str) -> None:
    spec = job(strategy("all-global", blocks=2))
    update: Arrays = {tensor: np.ones(shape, np.float32) for tensor, shape in spec.strategy.update_shapes.items()}
    updates.check_parameters(update, strategy_for(spec).shapes, spec)
    change(update)
    limits = spec.fold.model_copy(update={"max_norm": 100.0})
    with pytest.raises(VeilfedError, match=words) as refused:
        updates.check_parameters(update, strategy_for(spec).shapes, spec.model_copy(update={"fold": limits}))
    assert refused.value.code is Code.UPDATE_INVALID


# FedGH.


def pairs(seed: int = 0, n: int = 9) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
    rng = np.random.default_rng(seed)
    means = rng.standard_normal((n, DIMENSION))
    return means / np.linalg.norm(means, axis=1, keepdims=True), np.arange(n) % K


def loss(w: NDArray[np.float64], means: NDArray[np.float64], labels: NDArray[np.intp], temperature: float) -> float:
    logits = temperature * means @ w.T
    return float(np.mean(np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(labels)), labels]))


def test_the_header_s_gradient_is_that_of_finite_differences() -> None:
    means, labels = pairs()
    w = 0.1 * np.random.default_rng(5).standard_normal((K, DIMENSION))
    found = _gradient(w, means, labels, 20.0)
    for index in np.ndindex(w.shape):
        step = np.zeros_like(w)
        step[index] = 1e-6
        difference = loss(w + step, means, labels, 20.0) - loss(w - step, means, labels, 20.0)
        assert found[index] == pytest.approx(difference / 2e-6, abs=1e-6)


def test_the_header_steps_and_learns() -> None:
    means, labels = pairs()
    start = 0.1 * np.random.default_rng(5).standard_normal((K, DIMENSION))
    after = [train_header(start, means, labels, 20.0, 5e-3, steps) for steps in (1, 20, 200)]
    losses = [loss(w, means, labels, 20.0) for w in (start, *after)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.1 * losses[0]
    assert ((means @ after[-1].T).argmax(axis=1) == labels).all()
    np.testing.assert_allclose(np.abs(after[0] - start), 5e-3, rtol=1e-3)  # Adam's first step is the rate


def fedgh_updates(seed: int = 0) -> list[tuple[float, Arrays]]:
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((K, DIMENSION))
    made = [(centres + 0.1 * rng.standard_normal((K, DIMENSION))).astype(np.float32) for _ in range(4)]
    made[1][2] = 0  # this institution has no such class
    return [(1.0, {"means": rows}) for rows in made]


def test_fedgh_publishes_another_classifier_that_is_right_for_the_means() -> None:
    coordinator = made("fedgh")
    start = coordinator.initial()
    folded = coordinator.fold(fedgh_updates(), lambda: start)
    assert folded.keys() == {"classifier"}
    assert folded["classifier"].dtype == np.float32
    assert np.abs(floats(folded["classifier"]) - floats(start["classifier"])).max() > 0.01
    for _, update in fedgh_updates():
        guesses = (floats(update["means"]) @ floats(folded["classifier"]).T).argmax(axis=1)
        present = np.asarray(update["means"]).any(axis=1)
        np.testing.assert_array_equal(guesses[present], np.arange(K)[present])
    further = coordinator.fold(fedgh_updates(), lambda: folded)
    assert not np.array_equal(further["classifier"], folded["classifier"]), "it goes on from the current classifier"


def test_fedgh_gives_the_same_bytes_in_any_order() -> None:
    coordinator = made("fedgh")
    updates = fedgh_updates()
    first = map_bytes(coordinator.fold(updates, coordinator.initial))
    for seed in range(3):
        random.Random(seed).shuffle(updates)
        assert map_bytes(coordinator.fold(updates, coordinator.initial)) == first


def test_fedgh_without_any_mean_keeps_the_classifier() -> None:
    coordinator = made("fedgh")
    empty: Arrays = {"means": np.zeros((K, DIMENSION), np.float32)}
    assert map_bytes(coordinator.fold([(1.0, empty)], coordinator.initial)) == map_bytes(coordinator.initial())


def test_fedgh_refuses_a_job_whose_means_do_not_fit_into_memory() -> None:
    spec = strategy("fedgh", classes=[f"c{n}" for n in range(10_000)], dimension=1024, transform="identity")
    many = tuple(f"i{n}" for n in range(20))
    with pytest.raises(VeilfedError, match="institutions x classes") as refused:
        strategy_for(job(spec, many))
    assert refused.value.code is Code.JOB_INVALID


def test_a_job_s_own_json_keeps_its_method() -> None:
    for name in STRATEGIES:
        spec = job(strategy(name))
        assert type(JobSpec.model_validate_json(spec.model_dump_json()).strategy) is type(spec.strategy)
