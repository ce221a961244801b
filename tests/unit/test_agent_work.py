"""What an institution computes for a task, without any process."""

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from client_agent.backoff import Backoff
from client_agent.data.source import Samples
from client_agent.egress import EgressPolicy
from client_agent.oracle_client import _batches
from client_agent.state import JobFolder
from client_agent.work import Order, Prepared, model_of, perform, prepare
from veilfed.errors import Code, VeilfedError
from veilfed.jobs import JobSpec
from veilfed.wire.tensors import digest, map_bytes, parse_map

D = 8
POLICY = EgressPolicy(consent="allow", min_evaluation_samples=5)


def never() -> bool:
    return False


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def folder(tmp_path: Path) -> JobFolder:
    return JobFolder(tmp_path / "job")


def make(institution: str = "north", **strategy: Any) -> Prepared:
    document = {
        "name": "small",
        "strategy": {"name": "fedot", "classes": ["a", "b"], "dimension": D, "blocks": 2, **strategy},
        "cohort": {"train": ["north"], "evaluate": ["south"]},
        "rounds": 3,
        "quorum": 1,
    }
    rng = np.random.default_rng(0)
    labels = ["a", "b"] * 20
    features = rng.standard_normal((40, D)).astype(np.float32)
    features[::2, 0] += 3
    samples = Samples("text", [str(n) for n in range(40)], labels, [str(n) for n in range(40)])
    return prepare(JobSpec.model_validate(document), institution, samples, features, 0.4, POLICY)


def order(number: int, train: bool = True, seed: int = 0) -> Order:
    values = np.random.default_rng(seed).standard_normal((2, D)).astype(np.float32)
    model = map_bytes({"classifier": values})
    return Order(number, train, model, digest(model))


def refused(code: Code, function: Callable[[], object]) -> VeilfedError:
    with pytest.raises(VeilfedError) as caught:
        function()
    assert caught.value.code is code
    return caught.value


def test_a_finished_round_is_answered_from_the_disk(folder: JobFolder) -> None:
    prepared = make()
    first = perform(prepared, folder, order(0), POLICY, never)
    assert (first.previous, first.weight) == (-1, 1.0)
    assert [counts.name for counts in first.evaluations] == ["personal", "global"]
    # Asked again with training made impossible: the same result.
    again = perform(replace(prepared, trainer=None), folder, order(0), POLICY, never)
    assert again == first


def test_a_round_starts_from_the_round_before(folder: JobFolder, tmp_path: Path) -> None:
    prepared = make()
    perform(prepared, folder, order(0), POLICY, never)
    second = perform(prepared, folder, order(1, seed=1), POLICY, never)
    assert second.previous == 0
    state = prepared.method.read_state(second.state)
    assert state is not None
    assert state.last_round == 1
    # Another model of the same round: trained from the state before it, not on top of the first result.
    other = perform(prepared, folder, order(1, seed=2), POLICY, never)
    assert other.update != second.update
    assert perform(prepared, folder, order(1, seed=1), POLICY, never) == replace(second, answers=3)
    # The closing evaluation changes no state.
    closing = perform(prepared, folder, order(2, train=False, seed=3), POLICY, never)
    assert (closing.update, closing.weight) == (b"", 0.0)
    assert closing.state == second.state


def test_a_round_is_not_answered_for_ever_new_models(folder: JobFolder) -> None:
    prepared, policy = make(), EgressPolicy(max_answers_per_round=2)
    for number in range(2):
        for seed in range(2):
            last = perform(prepared, folder, order(number, seed=seed), policy, never)
        denied = refused(Code.POLICY_DENIED, partial(perform, prepared, folder, order(number, seed=2), policy, never))
        assert f"round {number} was answered 2 times" in denied.message
        # The same question has the same answer, as often as it is asked.
        assert perform(prepared, folder, order(number, seed=1), policy, never) == last
    # Going back does not forget.
    refused(Code.POLICY_DENIED, lambda: perform(prepared, folder, order(0, seed=2), policy, never))


def test_without_a_transform_both_counts_are_equal(folder: JobFolder) -> None:
    prepared = make(transform="identity")
    perform(prepared, folder, order(0), POLICY, never)
    personal, whole = perform(prepared, folder, order(1), POLICY, never).evaluations
    assert (personal.correct, personal.total) == (whole.correct, whole.total)


def test_who_only_evaluates(folder: JobFolder) -> None:
    prepared = make("south")
    finished = perform(prepared, folder, order(0, train=False), POLICY, never)
    assert [counts.name for counts in finished.evaluations] == ["global"]
    assert finished.state == finished.update == b""
    refused(Code.TASK_INVALID, lambda: perform(prepared, folder, order(1), POLICY, never))
    few = EgressPolicy(min_evaluation_samples=1000)
    refused(Code.POLICY_DENIED, lambda: perform(prepared, folder, order(1, train=False), few, never))


def test_few_test_samples_are_not_counted(folder: JobFolder) -> None:
    few = EgressPolicy(min_evaluation_samples=1000)
    assert perform(make(), folder, order(0), few, never).evaluations == ()


def test_a_cancelled_round_leaves_nothing(folder: JobFolder) -> None:
    stopped = threading.Event()
    stopped.set()
    refused(Code.CANCELLED, lambda: perform(make(), folder, order(0), POLICY, stopped.is_set))
    assert folder.rounds() == []


def test_a_damaged_state_is_not_trained_on(folder: JobFolder) -> None:
    prepared = make()
    perform(prepared, folder, order(0), POLICY, never)
    path = folder.path / "round-0.bin"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    refused(Code.STATE_CORRUPT, lambda: perform(prepared, folder, order(1), POLICY, never))


@pytest.mark.parametrize(
    "arrays",
    [
        {},
        {"other": np.zeros((2, D), np.float32)},
        {"classifier": np.zeros((2, D), np.float64)},
        {"classifier": np.zeros((3, D), np.float32)},
        {"classifier": np.full((2, D), np.inf, np.float32)},
        {"classifier": np.zeros((2, D), np.float32), "other": np.zeros(1, np.float32)},
    ],
)
def test_models_that_are_not_the_job_s(arrays: dict[str, Any]) -> None:
    strategy = make().spec.strategy
    refused(Code.PROTOCOL_VIOLATION, lambda: model_of(map_bytes(arrays), strategy))


def test_an_update_is_one_classifier(folder: JobFolder) -> None:
    arrays = parse_map(perform(make(), folder, order(0), POLICY, never).update)
    assert {name: (array.shape, array.dtype) for name, array in arrays.items()} == {
        "classifier": ((2, D), np.dtype("<f4"))
    }


def test_batches_of_neighbours_in_length() -> None:
    inputs = ["x" * length for length in (5, 1, 9, 2, 7, 3)]
    batches = [batch.tolist() for batch in _batches(inputs, most=2, most_bytes=1000)]
    assert batches == [[1, 3], [5, 0], [4, 2]]
    by_bytes = [batch.tolist() for batch in _batches([b"x" * 40, b"y" * 40, b"z"], most=64, most_bytes=70)]
    assert by_bytes == [[2, 0], [1]]
    refused(Code.DATA_INVALID, lambda: list(_batches([b"x" * 100], most=64, most_bytes=70)))


def test_delays_grow_to_the_cap() -> None:
    delays = Backoff(first_seconds=1.0, cap_seconds=8.0)
    steps = [delays.delay() for _ in range(6)]
    for step, bound in zip(steps, [1, 2, 4, 8, 8, 8], strict=True):
        assert bound / 2 <= step <= bound
    delays.reset()
    assert delays.delay() <= 1.0


def analytic(seed: int) -> Prepared:
    document = {
        "name": "small",
        "strategy": {"name": "afl", "classes": ["a", "b"], "dimension": D},
        "cohort": {"train": ["north"]},
        "rounds": 1,
        "quorum": 1,
    }
    labels = ["a", "b"] * 20
    features = np.random.default_rng(seed).standard_normal((40, D)).astype(np.float32)
    samples = Samples("text", [str(n) for n in range(40)], labels, [str(n) for n in range(40)])
    return prepare(JobSpec.model_validate(document), "north", samples, features, 0.4, POLICY)


def solved(number: int, train: bool) -> Order:
    model = map_bytes({"classifier": np.random.default_rng(number).standard_normal((2, D))})
    return Order(number, train, model, digest(model))


def test_statistics_are_sent_once_whatever_the_data_become(folder: JobFolder) -> None:
    first = perform(analytic(0), folder, solved(0, True), POLICY, never)
    assert {name: array.dtype for name, array in parse_map(first.update).items()} == {
        "counts": np.dtype(np.int64),
        "cross": np.dtype(np.float64),
        "gram": np.dtype(np.float64),
    }
    assert (first.weight, first.state, first.evaluations) == (1.0, b"", ())
    for number in (1, 3):
        evaluated = perform(analytic(0), folder, solved(number, False), POLICY, never)
        assert ([counts.name for counts in evaluated.evaluations], evaluated.update) == (["global"], b"")
    again = perform(analytic(1), folder, solved(4, True), POLICY, never)
    assert (again.update, again.weight) == (first.update, 1.0)
    (folder.path / "sent.bin").write_bytes((folder.path / "sent.bin").read_bytes()[:-1])
    refused(Code.STATE_CORRUPT, lambda: perform(analytic(1), folder, solved(6, True), POLICY, never))
    folder.purge()
    fresh = perform(analytic(1), folder, solved(6, True), POLICY, never)
    assert fresh.update != first.update
