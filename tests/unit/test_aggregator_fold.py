"""FEDOT at the coordinator, and the update gate."""

import math
import random
import tracemalloc
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from aggregator import gate
from aggregator.strategies import Strategy, strategy_for
from tests.support.aggregators import job_spec
from veilfed import updates
from veilfed.errors import Code, VeilfedError
from veilfed.jobs import JobSpec
from veilfed.v1.aggregator_pb2 import Evaluation, LedgerHead, Update
from veilfed.wire.tensors import Arrays, map_bytes

INSTITUTIONS = ["north", "south", "east", "west"]
MODELS = arrays(np.float32, (2, 4), elements=st.floats(-1000, 1000, width=32))


def spec(**changes: Any) -> JobSpec:
    return JobSpec.model_validate(job_spec(INSTITUTIONS, **changes))


def weighted() -> JobSpec:
    return spec(strategy={"weighting": "samples"}, fold={"max_weight": 1e5})


def fedot(job: JobSpec) -> Strategy:
    return strategy_for(job)


def nothing() -> Arrays:
    raise AssertionError("an average does not need the model before it")


@given(st.lists(st.tuples(st.integers(1, 100_000), MODELS), min_size=1, max_size=4), st.randoms())
def test_any_order_gives_the_same_bytes(updates: list[tuple[int, NDArray[Any]]], shuffler: random.Random) -> None:
    def folded(ordered: list[tuple[int, NDArray[Any]]]) -> bytes:
        return map_bytes(
            fedot(weighted()).fold(((float(weight), {"classifier": model}) for weight, model in ordered), nothing)
        )

    shuffled = list(updates)
    shuffler.shuffle(shuffled)
    assert folded(shuffled) == folded(updates)


@given(st.lists(st.tuples(st.integers(1, 100_000), MODELS), min_size=1, max_size=4))
def test_the_fold_is_the_weighted_mean(updates: list[tuple[int, NDArray[Any]]]) -> None:
    folded = fedot(weighted()).fold(((float(weight), {"classifier": model}) for weight, model in updates), nothing)[
        "classifier"
    ]
    assert folded.dtype == np.float32
    total = sum(weight for weight, _ in updates)
    for index in np.ndindex(2, 4):
        exact = sum(weight * Fraction(float(model[index])) for weight, model in updates) / total
        # Half a step of each term, and the rounding to float32.
        assert abs(float(folded[index]) - float(exact)) <= 2.0**-32 * len(updates) + abs(float(exact)) * 2.0**-23


def test_nothing_to_fold() -> None:
    with pytest.raises(VeilfedError, match="nothing to average"):
        fedot(spec()).fold([], nothing)


def test_the_largest_sum_that_the_job_allows_does_not_wrap() -> None:
    job = spec(fold={"fraction_bits": 48, "max_abs": 8000.0, "max_norm": 1e6})
    largest = np.full((2, 4), 8000, dtype=np.float32)
    folded = fedot(job).fold(((1.0, {"classifier": sign * largest}) for sign in (1, 1, 1, 1)), nothing)["classifier"]
    assert np.array_equal(folded, largest)


def test_a_large_fold_needs_little_more_than_its_sum_and_one_update() -> None:
    # Larger than one block several times over, and the last one not full.
    classes = [f"class {number}" for number in range(35)]
    job = spec(strategy={"classes": classes, "dimension": 60_001, "weighting": "samples"}, fold={"max_weight": 9})
    made, shape = fedot(job), (35, 60_001)
    models = [np.random.default_rng(seed).standard_normal(shape).astype(np.float32) for seed in (1, 2)]
    updates: list[tuple[float, Arrays]] = [(1.0, {"classifier": models[0]}), (3.0, {"classifier": models[1]})]
    tracemalloc.start()
    try:
        folded = np.asarray(made.fold(updates, nothing)["classifier"], dtype=np.float32)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * models[0].nbytes
    expected = (models[0].astype(np.float64) + 3.0 * models[1]) / 4.0
    assert folded.shape == shape
    assert float(np.max(np.abs(folded - expected))) < 1e-6


def test_the_first_model() -> None:
    first = fedot(spec()).initial()["classifier"]
    assert first.shape == (2, 4)
    assert first.dtype == np.float32
    assert np.allclose(np.linalg.norm(first, axis=1), 0.1)
    assert np.array_equal(first, fedot(spec()).initial()["classifier"])
    assert not np.array_equal(first, fedot(spec(seed=77)).initial()["classifier"])


def test_who_trains_in_which_round() -> None:
    strategy = fedot(JobSpec.model_validate(job_spec(["north"], ["south"])))
    asked = [(name, number, strategy.trains(name, number)) for number in range(5) for name in ("north", "south")]
    assert [(name, number) for name, number, trains in asked if trains] == [("north", 0), ("north", 1)]


def model(**at: float) -> NDArray[np.float32]:
    made = np.ones((2, 4), dtype=np.float32)
    for value in at.values():
        made[1, 2] = value
    return made


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({}, "expected the tensors"),
        ({"classifier": model(), "extra": model()}, "expected the tensors"),
        ({"other": model()}, "expected the tensors"),
        ({"classifier": model()[:1]}, "expected shape"),
        ({"classifier": model().reshape(4, 2)}, "expected shape"),
        ({"classifier": model().astype(np.float64)}, "expected float32"),
        ({"classifier": model().astype(np.int64)}, "expected float32"),
        ({"classifier": model(x=math.nan)}, "finite"),
        ({"classifier": model(x=math.inf)}, "finite"),
        ({"classifier": model(x=-math.inf)}, "finite"),
        ({"classifier": model(x=1001)}, "max_abs"),
        ({"classifier": model(x=-1001)}, "max_abs"),
        ({"classifier": model() * 8}, "max_norm"),
    ],
)
def test_parameters_that_are_refused(tensors: dict[str, NDArray[Any]], words: str) -> None:
    job = spec(fold={"max_norm": 20.0}) if words == "max_norm" else spec()
    with pytest.raises(VeilfedError, match=words) as caught:
        updates.check_parameters(tensors, fedot(job).shapes, job)
    assert caught.value.code is Code.UPDATE_INVALID


def test_right_parameters_pass() -> None:
    job = spec(fold={"max_norm": 20.0})
    updates.check_parameters({"classifier": model(x=-19)}, fedot(job).shapes, job)


LONG = 10_001  # elements of a row: two rows are more than two blocks


def long_job(**fold: float) -> JobSpec:
    return spec(strategy={"dimension": LONG}, fold={"max_norm": 1e12, **fold})


@pytest.mark.parametrize("place", [0, updates.BLOCK - 1, updates.BLOCK, 2 * updates.BLOCK, 2 * LONG - 1])
@pytest.mark.parametrize("value", [9.0, -9.0, math.nan, math.inf])
def test_the_largest_element_is_found_wherever_it_is(place: int, value: float) -> None:
    tensor = np.full((2, LONG), 3, np.float32)
    tensor.reshape(-1)[place] = value
    for largest in (8.99, 9.0):
        job = long_job(max_abs=largest)
        if value in (9, -9) and largest == 9:
            updates.check_parameters({"classifier": tensor}, fedot(job).shapes, job)
            continue
        with pytest.raises(VeilfedError, match="max_abs" if value in (9, -9) else "finite"):
            updates.check_parameters({"classifier": tensor}, fedot(job).shapes, job)


def test_the_norm_is_that_of_the_whole_tensor() -> None:
    tensor = np.random.default_rng(50).standard_normal((2, LONG)).astype(np.float32)
    norm = float(np.linalg.norm(tensor.astype(np.float64)))
    job = long_job(max_norm=norm * (1 + 1e-12))
    updates.check_parameters({"classifier": tensor}, fedot(job).shapes, job)
    job = long_job(max_norm=norm * (1 - 1e-12))
    with pytest.raises(VeilfedError, match="max_norm"):
        updates.check_parameters({"classifier": tensor}, fedot(job).shapes, job)
    zeros = np.zeros((2, LONG), np.float32)
    updates.check_parameters({"classifier": zeros}, fedot(job).shapes, job)


def test_the_limits_themselves_pass() -> None:
    job = spec(fold={"max_norm": math.sqrt(8), "max_abs": 1.0})
    updates.check_parameters({"classifier": np.ones((2, 4), np.float32)}, fedot(job).shapes, job)


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf, -math.inf, 1e5 + 1, 2.0**-33])
def test_weights_that_are_refused(weight: float) -> None:
    with pytest.raises(VeilfedError, match="weight") as caught:
        gate.check_weight(weight, True, weighted())
    assert caught.value.code is Code.UPDATE_INVALID


def test_weights() -> None:
    gate.check_weight(1e5, True, weighted())
    gate.check_weight(2.0**-32, True, weighted())
    gate.check_weight(1.0, True, spec())
    gate.check_weight(0.0, False, spec())
    for weight, trains in ((0.5, True), (1.0, False)):
        with pytest.raises(VeilfedError, match="weight"):
            gate.check_weight(weight, trains, spec())


@pytest.mark.parametrize(
    "evaluations",
    [
        [("other", 1, 2)],
        [("global", 1, 2), ("global", 1, 2)],
        [("global", 3, 2)],
        [("global", 0, 0)],
        [("personal", 1, 2**63)],
        [("personal", 1, 2**53 + 1)],
    ],
)
def test_evaluations_that_are_refused(evaluations: list[tuple[str, int, int]]) -> None:
    made = [Evaluation(name=name, correct=correct, total=total) for name, correct, total in evaluations]
    with pytest.raises(VeilfedError, match="evaluations") as caught:
        gate.check_evaluations(Update(evaluations=made))
    assert caught.value.code is Code.UPDATE_INVALID


def test_evaluations_may_be_kept_back() -> None:
    assert gate.check_evaluations(Update()) == []


@pytest.mark.parametrize(("correct", "total"), [(0, 1), (1, 1), (1, 2), (2, 3), (2**53, 2**53)])
def test_right_evaluations_pass(correct: int, total: int) -> None:
    made = [Evaluation(name=name, correct=correct, total=total) for name in ("personal", "global")]
    assert gate.check_evaluations(Update(evaluations=made)) == made


@pytest.mark.parametrize("records", [0, 1, 2**53])
def test_right_ledger_heads_pass(records: int) -> None:
    gate.check_head(LedgerHead(records=records, sha256="0a" * 32))


@pytest.mark.parametrize(
    ("records", "sha256"),
    [(1, ""), (1, "AB" * 32), (1, "ab" * 31), (1, "ab" * 33), (1, "ab" * 32 + "\n"), (2**53 + 1, "ab" * 32)],
)
def test_ledger_heads(records: int, sha256: str) -> None:
    with pytest.raises(VeilfedError) as caught:
        gate.check_head(LedgerHead(records=records, sha256=sha256))
    assert caught.value.code is Code.PROTOCOL_VIOLATION
