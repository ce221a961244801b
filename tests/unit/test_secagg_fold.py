"""A sum of vectors gives the same model, bit for bit, as the fold of the updates; and what a sum cannot be."""

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from aggregator.strategies import STRATEGIES, Strategy, strategy_for
from client_agent.trainers.statistics import Statistics
from tests.support.methods import CLASSES, DIMENSION, job, strategy
from veilfed.errors import Code, VeilfedError
from veilfed.jobs import COUNTS, FLOAT32, GRAM, JobSpec
from veilfed.secagg import Words
from veilfed.secagg.encoding import WEIGHT, encoding_for
from veilfed.updates import check_update
from veilfed.wire.tensors import Arrays, map_bytes

NAMES = ("one", "two", "four", "five")
PLAIN = ("fedgh", "all-local")
CASES: list[tuple[str, dict[str, Any], int]] = [
    *((name, {}, 0) for name in STRATEGIES if name not in PLAIN),
    ("fedot", {"weighting": "samples"}, 0),
    ("fedopal", {"prompt_weighting": "samples"}, 0),
    ("fedopal", {"reextract": True}, 0),
    ("fedopal", {"reextract": True}, 1),
]


def masked(name: str, **changes: Any) -> JobSpec:
    spec = strategy(name, **changes)
    values: dict[str, Any] = {"secure_aggregation": {}, "quorum": 3}
    if changes.get("weighting") == "samples":
        values["fold"] = {"max_weight": 1000}
    if changes.get("reextract"):
        values["rounds"] = 2
    return job(spec, NAMES, **values)


def statistics(seed: int) -> Arrays:
    rng = np.random.default_rng(seed)
    found = Statistics(DIMENSION, len(CLASSES))
    labels = rng.integers(0, len(CLASSES), 30 + seed)
    found.add(rng.standard_normal((30 + seed, DIMENSION)).astype(np.float32), labels)
    return found.arrays()


def updates(spec: JobSpec, number: int) -> list[tuple[str, float, Arrays]]:
    found = []
    for seed, institution in enumerate(NAMES):
        rng = np.random.default_rng(seed)
        arrays: Arrays = {}
        for name, shape in spec.strategy.round_shapes(number).items():
            if spec.strategy.dtype(name) == FLOAT32:
                arrays[name] = rng.standard_normal(shape).astype(np.float32)
            else:
                arrays[name] = statistics(seed)[name]
        check_update(arrays, spec, number)
        found.append((institution, float(17 + seed) if spec.strategy.weighting == "samples" else 1.0, arrays))
    return found


def total_of(spec: JobSpec, number: int) -> Words:
    encoding = encoding_for(spec, number)
    total = encoding.form.zeros()
    for _, weight, arrays in updates(spec, number):
        encoding.form.add(total, encoding.encode(arrays, weight))
    return total


@pytest.mark.parametrize(("name", "changes", "number"), CASES)
def test_the_same_bytes(name: str, changes: dict[str, Any], number: int) -> None:
    spec = masked(name, **changes)
    made = strategy_for(spec)
    plain, _ = made.fold_reported(updates(spec, number), made.initial)
    summed, report = made.fold_sum(total_of(spec, number), len(NAMES), number, made.initial)
    assert map_bytes(summed) == map_bytes(plain)
    assert "institutions" not in report, "nothing is known of a single one"
    assert not made.sealed


def test_counts_are_in_one_sum_alone() -> None:
    """Two sums of them, over institutions that differ by one, would tell those of that one."""
    spec = masked("fedopal", reextract=True)
    assert [COUNTS in encoding_for(spec, number).narrow for number in range(2)] == [False, True]


def _changed(made: Strategy, total: Words, name: str, by: int) -> None:
    number = 0
    encoding = encoding_for(made.spec, number)
    narrow, _ = encoding.form.parts(total)
    start = 0
    for part, shape in encoding.narrow.items():
        if part == name:
            narrow[start] += np.uint64(by)
        start += int(np.prod(shape))


@pytest.mark.parametrize(
    ("name", "part", "by"),
    [("fedot", WEIGHT, 1), ("fedot", "classifier", 1 << 50), ("afl", COUNTS, 1), ("fedcgs", COUNTS, 2**63)],
)
def test_sums_that_no_updates_have(name: str, part: str, by: int) -> None:
    made = strategy_for(masked(name))
    total = total_of(made.spec, 0)
    _changed(made, total, part, by)
    with pytest.raises(VeilfedError) as caught:
        made.fold_sum(total, len(NAMES), 0, made.initial)
    assert caught.value.code is Code.UPDATE_INVALID


def test_weights_of_another_number_of_updates() -> None:
    made = strategy_for(masked("fedot"))
    with pytest.raises(VeilfedError):
        made.fold_sum(total_of(made.spec, 0), len(NAMES) - 1, 0, made.initial)


def test_what_cannot_be_rounded_is_not_masked() -> None:
    spec = masked("afl")
    arrays = {**statistics(0), GRAM: np.full(DIMENSION * (DIMENSION + 1) // 2, np.nan)}
    with pytest.raises(VeilfedError) as caught:
        encoding_for(spec, 0).encode(arrays, 1.0)
    assert caught.value.code is Code.INPUT_INVALID


@pytest.mark.parametrize("name", PLAIN)
def test_methods_that_need_more_than_a_sum_are_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="more than a sum"):
        masked(name)


def test_specifications() -> None:
    with pytest.raises(ValidationError, match="quorum"):
        job(strategy("fedot"), NAMES, secure_aggregation={}, quorum=2)
    many = tuple(f"i{number}" for number in range(2001))
    with pytest.raises(ValidationError, match="2000"):
        job(strategy("fedot"), many, secure_aggregation={}, quorum=3)
    spec = masked("afl")
    assert spec.changes == 0
    assert spec.last_round == 1
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec
