"""The study of one shot against many rounds, on small made-up domains."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from client_agent.trainers import method_for
from tests.support.studies import CLASSES, made_up
from veilfed.errors import Code, VeilfedError
from veilfed_study import analytic, simulation
from veilfed_study.analytic import clients_of, whole_of
from veilfed_study.cells import job_of
from veilfed_study.methods import MethodSettings, Settings, with_rounds
from veilfed_study.shot_report import keep as keep_analytic
from veilfed_study.store import Store
from veilfed_study.variants import Grid, Variant, methods_of, ridges_of, variants

SUBJECT = made_up()
WHOLE = whole_of(SUBJECT, 50)
METHODS = ["afl", "fedcgs", "averaging", "fedot-b"]
GRID = Grid(clients=[2, 20], alphas=[0.05, 10.0], ridges=[0.5, "gcv"], least=[1, 5])
SETTINGS = with_rounds(
    Settings(split=50, methods={"fedot-b": MethodSettings(strategy={"blocks": 2, "transform_rate": 0.01})}),
    METHODS,
    2,
)


def study(folder: Path, ended: Any = lambda what: None, methods: Sequence[str] = METHODS) -> dict[str, Any]:
    return analytic.study(SUBJECT, methods, [50, 77], GRID, SETTINGS, Store(folder), ended)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return study(tmp_path_factory.mktemp("cells"))


def cells(document: dict[str, Any], name: str) -> list[dict[str, Any]]:
    (found,) = [variant for variant in document["variants"] if variant["name"] == name]
    return list(found["cells"])


@given(st.integers(1, 40), st.sampled_from([0.01, 0.5, 100.0]), st.integers(0, 50))
def test_each_training_row_is_with_one_client_and_test_rows_with_all(count: int, alpha: float, seed: int) -> None:
    found = clients_of(WHOLE, count, alpha, seed)
    assert len(found) == count
    assert all(len(part.train) for part in found.values())
    assert sorted(np.concatenate([part.train for part in found.values()]).tolist()) == WHOLE.train.tolist()
    assert all(np.array_equal(part.held, WHOLE.held) for part in found.values())


def test_a_benchmark_is_tested_on_its_own_test_rows() -> None:
    whole = whole_of(replace(SUBJECT, test_domain="two"), 50)
    features = [domain.features for domain in SUBJECT.domains.values()]
    assert np.array_equal(whole.training[0], np.concatenate([features[0], features[2]]))
    assert np.array_equal(whole.evaluation[0], features[1])
    assert np.array_equal(whole.evaluation[1], SUBJECT.domains["two"].labels)


def ridge_accuracy(penalty: float) -> float:
    """By the formula of the ridge regression, on all training rows in one place."""

    def unit(rows: Any) -> Any:
        wide = rows.astype(np.float64)
        return wide / np.linalg.norm(wide, axis=1, keepdims=True)

    (train, labels), (test, truth) = WHOLE.training, WHOLE.evaluation
    h, y = unit(train), np.eye(len(CLASSES))[labels]
    weights = np.linalg.inv(h.T @ h + penalty * np.eye(h.shape[1])) @ h.T @ y
    return float(np.mean((unit(test) @ weights).argmax(axis=1) == truth))


def test_afl_is_the_ridge_regression_on_all_rows_however_they_are_divided(whole: dict[str, Any]) -> None:
    for cell in cells(whole, "afl-0.5-1"):
        assert cell["accuracy"]["seeds"] == [ridge_accuracy(0.5)] * 2
        assert cell["samples_used"] == len(WHOLE.train)
    assert len({tuple(cell["accuracy"]["seeds"]) for cell in cells(whole, "afl-gcv-1")}) == 1
    assert len({tuple(cell["accuracy"]["seeds"]) for cell in cells(whole, "fedcgs-1")}) == 1


def test_the_policy_leaves_out_small_classes_of_clients(whole: dict[str, Any]) -> None:
    for name in ("afl-0.5-5", "fedcgs-5"):
        for cell in cells(whole, name):
            parts = [clients_of(WHOLE, cell["clients"], cell["alpha"], seed) for seed in (50, 77)]
            counts = [np.bincount(part.training[1]) for clients in parts for part in clients.values()]
            assert cell["samples_used"] == sum(n for count in counts for n in count if n >= 5) / 2
    assert min(cell["samples_used"] for cell in cells(whole, "afl-0.5-5")) < len(WHOLE.train)


def test_bytes_and_rounds_are_those_of_one_client_in_the_whole_job(whole: dict[str, Any]) -> None:
    dimension, classes = SUBJECT.dimension, len(CLASSES)
    sums = 8 * (dimension * (dimension + 1) // 2 + dimension * classes + classes)
    classifier = 4 * dimension * classes
    for cell in cells(whole, "afl-gcv-1"):
        assert cell["rounds"] == 1
        assert sums <= cell["bytes_sent"] <= sums + 100
    for cell in cells(whole, "fedot-b"):
        assert cell["rounds"] == 2
        assert 2 * classifier <= cell["bytes_sent"] <= 2 * (classifier + 50)
        assert 3 * classifier <= cell["bytes_received"] <= 3 * (classifier + 50)
        assert len(cell["by_round"]) == 3
        assert cell["by_round"][-1] == pytest.approx(cell["accuracy"]["mean"])


@pytest.mark.parametrize("method", ["averaging", "fedot-b"])
def test_own_is_the_accuracy_on_test_rows_in_each_client_s_mix(whole: dict[str, Any], method: str) -> None:
    (cell,) = [cell for cell in cells(whole, method) if cell["clients"] == 20 and cell["alpha"] == 0.05]
    clients = clients_of(WHOLE, 20, 0.05, 50)
    job = job_of(SUBJECT, method, SETTINGS.of(method), 50, list(clients), [])
    *_, last = simulation.rounds(job, clients)
    features, truth = WHOLE.evaluation
    found = []
    for name, part in clients.items():
        guesses = method_for(job.strategy).probabilities(last.model, last.states.get(name), features).argmax(axis=1)
        found.append(np.mean([np.mean(guesses[truth == label] == label) for label in part.training[1]]))
    assert cell["own"]["seeds"][0] == pytest.approx(np.mean(found))


def test_a_study_that_was_stopped_goes_on(tmp_path: Path) -> None:
    done: list[str] = []

    def stop(what: str) -> None:
        done.append(what)
        if len(done) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        study(tmp_path, stop, ["afl", "fedcgs"])
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert len(kept) == 5
    first = study(tmp_path, methods=["afl", "fedcgs"])
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    # The seconds that were measured are the same too: nothing was computed again.
    assert study(tmp_path, methods=["afl", "fedcgs"]) == first


def test_the_document_and_its_tables(tmp_path: Path, whole: dict[str, Any]) -> None:
    tables = keep_analytic(whole, tmp_path)
    assert json.loads((tmp_path / "analytic.json").read_text()) == whole
    assert len(tables) == 2
    drawn = (tmp_path / "plots" / "analytic.svg").read_text()
    for label in ("AFL, lambda by GCV", "FedCGS, classes from 5 samples on", "FEDOT(+B)", "made-up, 20 clients"):
        assert label in drawn
    assert "lambda 0.5" not in drawn
    lines = (tmp_path / "tables" / "analytic-20-accuracy.md").read_text().splitlines()
    assert lines[0].startswith("| method | alpha 0.05 | alpha 10 | rounds | bytes sent")
    assert len(lines) == 2 + len(variants(METHODS, GRID)) == 2 + 8
    labels = [line.split("|")[1].strip() for line in lines[2:]]
    assert labels[:2] == ["AFL, lambda 0.5", "AFL, lambda by GCV"]
    assert labels[5] == "FedCGS, classes from 5 samples on"
    assert len(set(labels)) == 8


def test_a_job_without_a_solution_has_no_accuracy_and_stops_nothing(tmp_path: Path) -> None:
    grid = Grid([2, 100], [10.0], [1.0], [40])
    found = analytic.study(SUBJECT, ["afl", "fedcgs"], [50, 77], grid, SETTINGS, Store(tmp_path))
    for name in ("afl-1.0-40", "fedcgs-40"):
        few, many = cells(found, name)
        assert few["accuracy"]["mean"] > 0.5
        assert many["samples_used"] == 0
        assert many["accuracy"]["mean"] is None
        assert many["own"]["mean"] is None
        assert many["by_round"] == [None, None]
    keep_analytic(found, tmp_path)
    line = (tmp_path / "tables" / "analytic-100-accuracy.md").read_text().splitlines()[2]
    assert line.split("|")[2].strip() == "-"
    json.dumps(found, allow_nan=False)


def test_what_cannot_be_studied_is_refused_before_anything_is_run(tmp_path: Path) -> None:
    for wrong in ("zero-shot", "fedot-b-text", "fedprox", "", "afl,afl"):
        with pytest.raises(VeilfedError) as caught:
            methods_of(wrong)
        assert caught.value.code is Code.INPUT_INVALID
    for wrong in ("", "1,1", "gcv,gcv", "much"):
        with pytest.raises(VeilfedError, match="--ridges"):
            ridges_of(wrong)
    assert ridges_of("gcv,1,0.1") == [1.0, 0.1, "gcv"]
    assert variants(["afl"], Grid([1], [1.0], ["gcv"], [1])) == [Variant("afl", "gcv", 1)]
    bad = [
        (Grid([2], [0.0], [1.0], [1]), Code.INPUT_INVALID),
        (Grid([500], [1.0], [1.0], [1]), Code.DATA_INVALID),
        (Grid([2], [1.0], [-1.0], [1]), Code.JOB_INVALID),
    ]
    for grid, code in bad:
        with pytest.raises(VeilfedError) as caught:
            analytic.study(SUBJECT, ["afl"], [50], grid, SETTINGS, Store(tmp_path))
        assert caught.value.code is code
    assert not list(tmp_path.iterdir())
