"""The private state on disk: whole or refused, and nobody else's to read."""

import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from client_agent.trainers import FedotState
from veilfed.errors import Code, VeilfedError
from veilfed.jobs import FedotStrategy
from veilfed.wire.tensors import map_bytes


def strategy(**changes: Any) -> FedotStrategy:
    values: dict[str, Any] = {"name": "fedot", "classes": ["a", "b"], "dimension": 6, "blocks": 2}
    return FedotStrategy.model_validate(values | changes)


def state() -> FedotState:
    rng = np.random.default_rng(0)
    transform, mean, square = rng.normal(size=(3, 2, 3, 3)).astype(np.float32)
    classifier_mean, classifier_square = rng.normal(size=(2, 2, 6)).astype(np.float32)
    return FedotState(transform, mean, square, classifier_mean, classifier_square, steps=17, last_round=4)


def test_the_first_state_is_the_identity_that_has_trained_nothing() -> None:
    first = FedotState.initial(strategy())
    assert first.transform.shape == (2, 3, 3)
    assert not first.transform.any()
    assert (first.steps, first.last_round) == (0, -1)
    assert FedotState.initial(strategy(transform="identity")).transform.size == 0


def test_comes_back_from_a_file_that_only_its_owner_can_read(tmp_path: Path) -> None:
    path = tmp_path / "state"
    FedotState.initial(strategy()).save(path)
    state().save(path)
    back = FedotState.load(path, strategy())
    assert back.to_bytes() == state().to_bytes()
    np.testing.assert_array_equal(back.transform, state().transform)
    assert (back.steps, back.last_round) == (17, 4)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["state"]  # no temporary file stays


@given(st.data())
def test_any_changed_or_missing_byte_is_found(draws: st.DataObject) -> None:
    whole = state().to_bytes()
    position = draws.draw(st.integers(0, len(whole) - 1))
    flipped = bytearray(whole)
    flipped[position] ^= draws.draw(st.integers(1, 255))
    for damaged in (bytes(flipped), whole[:position], whole + b"\0"):
        with pytest.raises(VeilfedError) as refused:
            FedotState.from_bytes(damaged, strategy())
        assert refused.value.code is Code.STATE_CORRUPT


@pytest.mark.parametrize("change", [{"blocks": 3}, {"classes": ["a", "b", "c"]}, {"transform": "identity"}])
def test_the_state_of_another_job_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(VeilfedError, match="the job needs") as refused:
        FedotState.from_bytes(state().to_bytes(), strategy(**change), "jobs/x/state")
    assert refused.value.code is Code.STATE_CORRUPT
    assert "jobs/x/state" in refused.value.message


def test_values_that_training_never_gives_are_refused() -> None:
    bad = state()
    bad.transform[0, 0, 0] = np.nan
    with pytest.raises(VeilfedError, match="not finite"):
        FedotState.from_bytes(bad.to_bytes(), strategy())
    with pytest.raises(VeilfedError, match="negative"):
        FedotState.from_bytes(replace(state(), steps=-1).to_bytes(), strategy())


def test_a_whole_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(map_bytes({"classifier": np.zeros((2, 6), np.float32)}))
    with pytest.raises(VeilfedError) as refused:
        FedotState.load(path, strategy())
    assert refused.value.code is Code.STATE_CORRUPT


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "state"
    with pytest.raises(VeilfedError, match="missing") as refused:
        state().save(path)
    assert refused.value.code is Code.FILE_UNUSABLE
    with pytest.raises(VeilfedError, match="missing"):
        FedotState.load(path, strategy())
