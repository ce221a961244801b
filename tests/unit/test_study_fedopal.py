"""FedOPAL in the study of one shot against many rounds, with a small model that takes prompts."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from aggregator.strategies import strategy_for
from client_agent.data.source import Samples
from tests.support.agents import CLASSES, DIMENSION, PromptedLetters
from tests.support.studies import made_up
from veilfed.errors import Code, VeilfedError
from veilfed.jobs import FIRST_PROMPTS
from veilfed_study import analytic, simulation, subjects
from veilfed_study.analytic import clients_of, some_of, whole_of
from veilfed_study.methods import Settings
from veilfed_study.prompted import inputs_of
from veilfed_study.shot_report import keep as keep_analytic
from veilfed_study.store import Store
from veilfed_study.subjects import Subject
from veilfed_study.variants import Grid, Tuning, Variant, tunings_of, variants

Double = NDArray[np.float64]

INFINITE = Tuning(float("inf"))
GRID = Grid([3], [0.5], [0.5, "gcv"], [1], [Tuning(0.01, 2), INFINITE])
SETTINGS = Settings(split=50)


def samples(seed: int) -> Samples:
    """60 texts of mostly vowels or mostly consonants."""
    rng = np.random.default_rng(seed)
    labels = [CLASSES[number % 2] for number in range(60)]
    likely = {"vowels": "aeiou" * 2 + "bcdfg", "consonants": "bcdfg" * 2 + "aeiou"}
    texts = ["".join(rng.choice(list(likely[label]), 12)) for label in labels]
    return Samples("text", texts, labels, [f"{seed}-{number}" for number in range(60)])


def made_letters(cache: Path) -> Subject:
    """Two domains of such texts."""
    domains = {"one": samples(1), "two": samples(2)}
    return subjects.of_samples("letters", "letters", domains, CLASSES, PromptedLetters(), cache)


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return made_letters(tmp_path_factory.mktemp("cache"))


def study(subject: Subject, folder: Path, ended: Any = lambda what: None, **changes: Any) -> dict[str, Any]:
    return analytic.study(subject, ["afl", "fedopal"], [50, 77], GRID, SETTINGS, Store(folder), ended, **changes)


@pytest.fixture(scope="module")
def whole(subject: Subject, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return study(subject, tmp_path_factory.mktemp("cells"))


def cell(document: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [variant for variant in document["variants"] if variant["name"] == name]
    (one,) = found["cells"]
    return dict(one)


def unit(rows: Any) -> Double:
    wide = np.asarray(rows, np.float64)
    scaled: Double = wide / np.linalg.norm(wide, axis=1, keepdims=True)
    return scaled


def ridge_accuracy(subject: Subject, prompts: Any, penalty: float = 0.5) -> float:
    """By the formula, on all training rows in one place, with these prompts everywhere."""
    rows, model = whole_of(subject, 50), PromptedLetters()

    def features(wanted: NDArray[np.intp]) -> Double:
        return unit(model.forward_prompted(model.prepare(inputs_of(rows, wanted)), np.asarray(prompts, np.float32)))

    h, y = features(rows.train), np.eye(2)[rows.domain.labels[rows.train]]
    weights = np.linalg.solve(h.T @ h + penalty * np.eye(DIMENSION), h.T @ y)
    return float(np.mean((features(rows.held) @ weights).argmax(axis=1) == rows.domain.labels[rows.held]))


def job(subject: Subject, name: str, seed: int = 50) -> Any:
    variant = next(one for one in variants(["fedopal"], GRID) if one.name == name)
    clients = clients_of(whole_of(subject, 50), 3, 0.5, seed)
    return analytic.job_for(subject, variant, SETTINGS, seed, list(clients)), clients


def test_an_infinite_mu_is_afl_on_the_features_of_the_first_prompts(subject: Subject, whole: dict[str, Any]) -> None:
    """Whatever the division; to the test row, for each seed, which draws the first prompts."""
    found = cell(whole, "fedopal-0.5-1-muinf-e1")
    first = [
        strategy_for(job(subject, "fedopal-0.5-1-muinf-e1", seed)[0]).initial()[FIRST_PROMPTS] for seed in (50, 77)
    ]
    assert found["accuracy"]["seeds"] == [ridge_accuracy(subject, prompts) for prompts in first]
    assert not np.array_equal(first[0], first[1])


def test_reextracting_is_the_ridge_regression_on_the_features_of_the_mean_prompt(
    subject: Subject, whole: dict[str, Any]
) -> None:
    spec, clients = job(subject, "fedopal-0.5-1-mu0.01-e2-reextract")
    *_, last = simulation.rounds(spec, clients, min_class_samples=1, backbone=subject.backbone)
    own: list[Any] = [state.tensors["prompts"] for state in last.states.values()]
    assert np.allclose(last.model["prompts"], np.mean(own, axis=0), atol=1e-6)
    assert not np.allclose(last.model["prompts"], last.model[FIRST_PROMPTS], atol=1e-3)
    found = cell(whole, "fedopal-0.5-1-mu0.01-e2-reextract")
    assert found["accuracy"]["seeds"][0] == ridge_accuracy(subject, last.model["prompts"])


@settings(max_examples=12)
@given(st.integers(1, 15), st.sampled_from([0.05, 1.0, 50.0]), st.integers(0, 2**31 - 1), st.booleans())
def test_any_division_gives_the_ridge_regression_on_one_prompt(
    subject: Subject, clients: int, alpha: float, seed: int, reextract: bool
) -> None:
    """That of the first prompts, where mu is infinite, and of the mean prompt, with `reextract`; to rounding."""
    tuning = Tuning(0.01, 2) if reextract else INFINITE  # of one batch, the first moves nothing
    parts = clients_of(whole_of(subject, 50), clients, alpha, seed)
    variant = Variant("fedopal", 0.5, 1, tuning, reextract)
    spec = analytic.job_for(subject, variant, SETTINGS, seed, list(parts))
    *_, last = simulation.rounds(spec, parts, min_class_samples=1, backbone=subject.backbone)
    prompts = np.asarray(last.model["prompts"], np.float32)
    assert np.array_equal(prompts, last.model[FIRST_PROMPTS]) is not reextract
    rows, model = whole_of(subject, 50), PromptedLetters()
    h = unit(model.forward_prompted(model.prepare(inputs_of(rows, rows.train)), prompts))
    matrix = h.T @ h + 0.5 * np.eye(DIMENSION)
    expected = np.linalg.solve(matrix, h.T @ np.eye(2)[rows.domain.labels[rows.train]]).T
    found = last.model["classifier"].astype(np.float64)
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error <= max(1e-10, 100 * np.finfo(np.float64).eps * np.linalg.cond(matrix))


def test_what_the_model_is_asked_is_counted_for_each_job(whole: dict[str, Any]) -> None:
    """Also where another job had asked it before: E n gradients, and n embeddings for the statistics."""
    n = whole["rows"]["training"]
    for name in ("fedopal-0.5-1-mu0.01-e2", "fedopal-gcv-1-mu0.01-e2", "fedopal-0.5-1-mu0.01-e2-reextract"):
        found = cell(whole, name)
        assert (found["gradients"], found["inputs"]) == (2 * n, 3 * n)
    assert cell(whole, "fedopal-0.5-1-muinf-e1")["inputs"] == 2 * n
    plain = cell(whole, "afl-0.5-1")
    assert (plain["inputs"], plain["gradients"], plain["model_seconds"]) == (0, 0, 0)
    assert whole["embedding"]["inputs"] == n


def test_rounds_and_bytes(whole: dict[str, Any]) -> None:
    one, two, afl = (
        cell(whole, name) for name in ("fedopal-0.5-1-mu0.01-e2", "fedopal-0.5-1-mu0.01-e2-reextract", "afl-0.5-1")
    )
    prompts = 4 * 10 * 8
    assert (one["rounds"], two["rounds"], afl["rounds"]) == (1, 2, 1)
    assert prompts <= one["bytes_sent"] - afl["bytes_sent"] <= prompts + 100
    assert 0 < two["bytes_sent"] - one["bytes_sent"] <= 200  # the counts once more
    assert one["by_round"] == [None, one["accuracy"]["mean"]]


def test_own_is_with_the_own_prompts_and_of_the_first_tuning_alone(subject: Subject, whole: dict[str, Any]) -> None:
    spec, clients = job(subject, "fedopal-0.5-1-mu0.01-e2")
    *_, last = simulation.rounds(spec, clients, min_class_samples=1, backbone=subject.backbone)
    model, expected = PromptedLetters(), []
    for name, part in clients.items():
        truth = part.domain.labels[part.held]
        own = last.states[name].tensors["prompts"].astype(np.float32)
        h = unit(model.forward_prompted(model.prepare(inputs_of(part, part.held)), own))
        right = (h @ last.model["classifier"].astype(np.float64).T).argmax(axis=1) == truth
        expected.append(np.mean([right[truth == label].mean() for label in part.training[1]]))
    assert cell(whole, "fedopal-0.5-1-mu0.01-e2")["own"]["seeds"][0] == pytest.approx(np.mean(expected))
    assert cell(whole, "fedopal-0.5-1-muinf-e1")["own"]["mean"] is None


def test_gaps_are_between_variants_on_the_same_rows(whole: dict[str, Any]) -> None:
    (place,) = whole["gaps"]
    one, other = "fedopal-gcv-1-mu0.01-e2", "afl-gcv-1"
    mean, low, high = place["of"][one][other]
    assert mean == pytest.approx(cell(whole, one)["accuracy"]["mean"] - cell(whole, other)["accuracy"]["mean"])
    assert low <= mean <= high
    assert place["of"][other][one] == pytest.approx([-mean, -high, -low])
    assert place["of"].keys() == {variant["name"] for variant in whole["variants"]}


def test_a_study_that_was_stopped_goes_on(subject: Subject, tmp_path: Path) -> None:
    done: list[str] = []

    def stop(what: str) -> None:
        done.append(what)
        if len(done) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        study(subject, tmp_path, stop)
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert len(kept) == 5
    first = study(subject, tmp_path)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert study(subject, tmp_path) == first


def test_fewer_rows_are_drawn_from_each_side(subject: Subject, tmp_path: Path) -> None:
    whole = whole_of(subject, 50)
    few = some_of(whole, 24, 50)
    assert len(few.train) == 24
    assert len(few.held) == round(len(whole.held) * 24 / len(whole.train))
    assert set(few.train) < set(whole.train)
    assert set(few.held) < set(whole.held)
    assert np.array_equal(few.train, some_of(whole, 24, 50).train)
    assert some_of(whole, None, 50) is some_of(whole, 10_000, 50) is whole
    found = study(subject, tmp_path, rows=24)
    assert found["rows"]["training"] == cell(found, "afl-0.5-1")["samples_used"] == 24


def test_the_tables_have_it(whole: dict[str, Any], tmp_path: Path) -> None:
    keep_analytic(whole, tmp_path)
    text = (tmp_path / "tables" / "analytic-3-accuracy.md").read_text()
    for label in ("FedOPAL, mu 0.01, E 2, lambda 0.5", "FedOPAL, mu infinite, E 1, lambda by GCV", "reextract"):
        assert label in text
    json.dumps(whole, allow_nan=False)


def test_what_cannot_be_studied_is_refused(tmp_path: Path) -> None:
    for wrong in ("", "0.1", "0.1:0", "-1:1", "nan:1", "0.1:1,0.1:1", "0.1:1.5", "a:b"):
        with pytest.raises(VeilfedError, match="--tunings") as caught:
            tunings_of(wrong)
        assert caught.value.code is Code.INPUT_INVALID
    assert tunings_of("0.1:1,inf:2") == [Tuning(0.1, 1), Tuning(float("inf"), 2)]
    with pytest.raises(VeilfedError, match="takes no prompts") as caught:
        study(made_up(), tmp_path)
    assert caught.value.code is Code.INPUT_INVALID
    assert not list(tmp_path.iterdir())
