"""Studies in one process, on small made-up domains: what they measure, what they never read, how they go on."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from client_agent.data.source import Samples
from tests.support.agents import LetterModel
from tests.support.studies import CLASSES, NAMES, domain, made_up
from veilfed.demo.tasks import TASKS
from veilfed.errors import Code, VeilfedError
from veilfed.wire.tensors import Arrays
from veilfed_study import measures, sweep
from veilfed_study.cells import Cell, job_of
from veilfed_study.methods import METHODS, MethodSettings, Settings, built_in_settings, named, possible, read_settings
from veilfed_study.options import choice, counts
from veilfed_study.parts import Domain, Part, fold_numbers, split_parts, validation_parts
from veilfed_study.report import Asked, tasks
from veilfed_study.runner import Results, run
from veilfed_study.simulation import last_model
from veilfed_study.store import Store
from veilfed_study.subjects import Subject, of_folder, of_samples
from veilfed_study.summary import document

SUBJECT = made_up()
RATES = {"batch_size": 32, "classifier_rate": 5e-3, "transform_rate": 1e-2, "blocks": 2}


def settings(rounds: int = 3) -> Settings:
    """The same rates for all methods, of those that each has."""
    keys = {name: {"batch_size", *method.rates} for name, method in METHODS.items()}
    return Settings(
        methods={
            name: MethodSettings(rounds=rounds, strategy={key: RATES[key] for key in known if key in RATES})
            for name, known in keys.items()
        }
    )


def study(folder: Path, methods: list[str], rounds: int = 3, subject: Subject = SUBJECT) -> tuple[Results, Any]:
    seeds = [50, 77]
    results = run(subject, methods, seeds, settings(rounds), Store(folder))
    return results, document(subject, methods, seeds, settings(rounds), results)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, Any]:
    """Every method."""
    return study(tmp_path_factory.mktemp("cells"), list(METHODS))


def test_the_private_transform_beats_the_identity_where_domains_are_rotations(tmp_path: Path) -> None:
    _, found = study(tmp_path, ["averaging", "fedot-b"], rounds=15)
    averaging, fedot = found["methods"]["averaging"], found["methods"]["fedot-b"]
    assert fedot["P"]["mean"] > averaging["P"]["mean"] + 0.03
    assert fedot["C"]["mean"] > averaging["C"]["mean"]


@pytest.mark.parametrize("method", METHODS)
def test_the_figures_of_each_method_belong_together(whole: tuple[Results, Any], method: str) -> None:
    found = whole[1]["methods"][method]
    matrix = np.array(found["matrix"], dtype=float)
    off = ~np.eye(3, dtype=bool)
    assert found["P"]["mean"] == pytest.approx(matrix[off].mean())
    assert len(found["by_round"]["P"]) == (4 if METHODS[method].trains else 1)
    assert found["by_round"]["P"][-1] == pytest.approx(found["P"]["mean"])
    if method == "all-local":
        assert np.isnan(np.diagonal(matrix)).all()
        assert found["G"]["mean"] is None
        assert found["C"]["mean"] is None
    else:
        assert found["G"]["mean"] == pytest.approx(np.diagonal(matrix).mean())
        assert found["C"]["mean"] == pytest.approx((found["G"]["mean"] + 2 * found["P"]["mean"]) / 3)
        assert found["P"]["sd"] == pytest.approx(np.std(found["P"]["seeds"], ddof=1))
    conditions = found["condition_number"]
    if method in {"fedadapter", "fedclip", "fedclip-text"}:
        assert conditions is None
    elif method == "fedlt":
        assert conditions["mean"] > 1.01
    else:
        assert conditions["largest"] == pytest.approx(1)
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(
    ("method", "sent", "private"),
    [
        ("zero-shot", 0, 0),
        ("averaging", 24, 0),
        ("fedot", 24, 8 * 7 // 2),
        ("fedot-b", 24, 8 * 3 // 2),
        ("all-global", 24 + 32, 0),
        ("all-local", 0, 24 + 8 * 3 // 2),
        ("fedlt", 24, 64),
        ("fedadapter", 24, 64 * 8 + 64 + 8 * 64),
        ("fedgh", 24, 8 * 7 // 2),
    ],
)
def test_what_a_method_sends_and_keeps(whole: tuple[Results, Any], method: str, sent: int, private: int) -> None:
    found = whole[1]["methods"][method]
    assert (found["numbers_sent"], found["private_freedom"]) == (sent, private)
    assert 4 * sent <= found["bytes_sent"] <= 4 * sent + 100


def test_conflict_is_there_for_methods_that_send_a_classifier(whole: tuple[Results, Any]) -> None:
    for method, found in whole[1]["methods"].items():
        if method in {"zero-shot", "all-local", "fedgh", "fedclip-text"}:
            assert found["conflict"] is None
        else:
            assert len(found["conflict"]["by_round"]) == 3
            assert np.mean(found["conflict"]["seeds"], axis=0) == pytest.approx(found["conflict"]["by_round"])


def test_conflict_is_the_mean_cosine_of_the_steps() -> None:
    start: Arrays = {"classifier": np.zeros((1, 2), np.float32)}
    ends = {"one": [[1.0, 0.0]], "two": [[0.0, 2.0]], "three": [[-3.0, 0.0]]}
    updates: dict[str, Arrays] = {name: {"classifier": np.array(end, np.float32)} for name, end in ends.items()}
    assert measures.conflict(start, updates) == pytest.approx((0 - 1 + 0) / 3)
    assert measures.conflict(start, {"one": updates["one"]}) is None


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=40))
def test_the_area_under_the_curve_counts_pairs(rows: list[tuple[int, bool]]) -> None:
    scores, positive = np.array([score for score, _ in rows]), np.array([label for _, label in rows])
    pairs = [(a > b) + (a == b) / 2 for a in scores[positive] for b in scores[~positive]]
    found = measures.area(scores, positive)
    assert found is None if not pairs else found == pytest.approx(np.mean(pairs))


def test_areas_are_for_two_classes(tmp_path: Path) -> None:
    _, found = study(tmp_path, ["averaging"], subject=made_up(classes=2))
    assert 0.5 < found["methods"]["averaging"]["areas"]["C"]["mean"] <= 1


def test_a_job_gives_the_same_model_again_bit_for_bit() -> None:
    job = job_of(SUBJECT, "fedot-b", settings().of("fedot-b"), 50, ["one", "three"], ["two"])
    parts = split_parts(SUBJECT.domains, CLASSES, 50)
    assert last_model(job, parts)["classifier"].tobytes() == last_model(job, parts)["classifier"].tobytes()


def test_a_study_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    done: list[tuple[Cell, bool]] = []

    def stop(cell: Cell, kept: bool) -> None:
        done.append((cell, kept))
        if len(done) == 4:
            raise KeyboardInterrupt

    methods, seeds = ["averaging", "fedot-b"], [50]
    with pytest.raises(KeyboardInterrupt):
        run(SUBJECT, methods, seeds, settings(), Store(tmp_path), stop)
    done = []
    again = run(SUBJECT, methods, seeds, settings(), Store(tmp_path), lambda cell, kept: done.append((cell, kept)))
    assert [kept for _, kept in done] == [True] * 4 + [False] * 2
    fresh = run(SUBJECT, methods, seeds, settings(), Store(tmp_path / "fresh"))
    assert without_seconds(again) == without_seconds(fresh)


def without_seconds(results: Results) -> dict[Cell, Any]:
    return {cell: {**result, "seconds": 0} for cell, result in results.items()}


def test_results_of_other_settings_or_data_are_computed_anew(tmp_path: Path) -> None:
    def kept(subject: Subject, rounds: int, method: str = "averaging") -> list[bool]:
        told: list[bool] = []
        run(subject, [method], [50], settings(rounds), Store(tmp_path), lambda _, was: told.append(was))
        return told

    assert kept(SUBJECT, 2) == [False] * 3
    assert kept(SUBJECT, 2) == [True] * 3
    assert kept(SUBJECT, 1) == [False] * 3
    other = replace(SUBJECT, domains={**SUBJECT.domains, "two": domain("two", 0.3)})
    assert kept(other, 1) == [False] * 3
    # And do not take the place of the first.
    assert kept(SUBJECT, 2) == [True] * 3
    # Class vectors are data of those methods that take them, and of no others.
    prompts = replace(SUBJECT, _vectors=lambda: np.eye(3, 8, 1, dtype=np.float32))
    assert kept(prompts, 2) == [True] * 3
    assert kept(SUBJECT, 2, "fedot-b-text") == [False] * 3
    assert kept(prompts, 2, "fedot-b-text") == [False] * 3
    assert kept(SUBJECT, 2, "fedot-b-text") == [True] * 3


def test_a_damaged_result_is_named(tmp_path: Path) -> None:
    run(SUBJECT, ["averaging"], [50], settings(), Store(tmp_path))
    (path,) = tmp_path.glob("averaging-50-without-two-*.json")
    path.write_text("{")
    with pytest.raises(VeilfedError, match=r"averaging-50-without-two-\w+\.json: not JSON") as caught:
        run(SUBJECT, ["averaging"], [50], settings(), Store(tmp_path))
    assert caught.value.code is Code.STATE_CORRUPT


# Validation.


def test_validation_sees_no_test_row_and_every_training_row_once() -> None:
    whole = split_parts(SUBJECT.domains, CLASSES, 98)
    seen: dict[str, list[int]] = {name: [] for name in NAMES}
    for parts in validation_parts(whole, 98, folds=4, used=4):
        for name, part in parts.items():
            assert not set(part.train) & set(part.held)
            assert set(part.train) | set(part.held) == set(whole[name].train)
            groups = part.domain.samples.groups
            assert not {groups[row] for row in part.train} & {groups[row] for row in part.held}
            seen[name] += part.held.tolist()
    for name in NAMES:
        assert sorted(seen[name]) == sorted(whole[name].train.tolist())


def test_folds_are_even_within_each_class() -> None:
    part = split_parts(SUBJECT.domains, CLASSES, 50)["one"]
    numbers = fold_numbers(part, 3, 50)
    for label in range(3):
        counts = np.bincount(numbers[part.domain.labels[part.train] == label], minlength=3)
        assert counts.max() - counts.min() <= 2  # one group of two


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 2)), min_size=4, max_size=60),
    st.integers(2, 5),
    st.integers(0),
)
def test_folds_keep_groups_whole_whatever_their_classes(rows: list[tuple[int, int]], folds: int, seed: int) -> None:
    groups = [str(group) for group, _ in rows]
    labels = np.array([label for _, label in rows], np.int64)
    samples = Samples("text", groups, [CLASSES[label] for label in labels], groups)
    every = np.arange(len(rows))
    numbers = fold_numbers(
        Part(Domain(samples, np.empty((len(rows), 1), np.float32), labels), every, every), folds, seed
    )
    assert len({(group, number) for group, number in zip(groups, numbers, strict=True)}) == len(set(groups))
    assert set(numbers) <= set(range(folds))


GRID = sweep.Grid([5e-3, 2e-2], [1e-2], [1, 2], [1, 3])
VALIDATION = sweep.Validation(split=50, folds=3, used=1)


def test_a_sweep_chooses_from_the_grid_and_never_sees_test_labels(tmp_path: Path) -> None:
    """Test labels are replaced: the figures stay the same."""
    methods = ["averaging", "all-local", "fedot-b"]
    found = sweep.sweep(SUBJECT, methods, [50], GRID, VALIDATION, Store(tmp_path / "a"))
    assert {method: len(rows["grid"]) for method, rows in found["methods"].items()} == {
        "averaging": 2 * 2,
        "all-local": 2 * 2 * 2,
        "fedot-b": 2 * 2 * 2,
    }
    for method in methods:
        assert found["methods"][method]["chosen"] in found["methods"][method]["grid"]
    chosen = Settings.model_validate(sweep.settings_of(found))
    assert chosen.of("averaging").strategy.keys() == {"classifier_rate"}
    blinded = {}
    for name, part in split_parts(SUBJECT.domains, CLASSES, 50).items():
        labels = part.domain.labels.copy()
        labels[part.held] = 0
        blinded[name] = replace(part.domain, labels=labels)
    again = sweep.sweep(replace(SUBJECT, domains=blinded), methods, [50], GRID, VALIDATION, Store(tmp_path / "b"))
    assert again == found


def test_the_test_rows_of_no_seed_are_among_those_that_settings_were_chosen_on(tmp_path: Path) -> None:
    """The labels that decide in the sweep are replaced: figures of an untrained model do not move for any seed."""
    found = sweep.sweep(SUBJECT, ["averaging"], [50, 77], GRID, VALIDATION, Store(tmp_path / "sweep"))
    chosen = Settings.model_validate(sweep.settings_of(found))
    assert chosen.split == VALIDATION.split
    untrained = chosen.model_copy(update={"methods": {"averaging": MethodSettings(rounds=0)}})
    spoilt = {}
    for name, part in split_parts(SUBJECT.domains, CLASSES, VALIDATION.split).items():
        labels = part.domain.labels.copy()
        labels[part.train] = (labels[part.train] + 1) % 3
        spoilt[name] = replace(part.domain, labels=labels)
    figures = [
        run(subject, ["averaging"], [50, 77, 98], untrained, Store(tmp_path / "cells"))
        for subject in (SUBJECT, replace(SUBJECT, domains=spoilt))
    ]
    assert without_seconds(figures[0]) == without_seconds(figures[1])


def test_seeds_of_one_split_share_their_test_rows_and_others_do_not() -> None:
    assert Settings(split=7).split_of(50) == Settings(split=7).split_of(77) == 7
    assert Settings().split_of(77) == 77


def test_a_sweep_goes_on_where_it_was_stopped_and_knows_the_defaults_of_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finished() -> int:
        return len(list(tmp_path.glob("averaging-*.json")))

    sweep.sweep(SUBJECT, ["averaging"], [50], GRID, VALIDATION, Store(tmp_path))
    first = finished()
    sweep.sweep(SUBJECT, ["averaging"], [50], GRID, VALIDATION, Store(tmp_path))
    assert finished() == first == 2
    batches = replace(METHODS["averaging"], defaults={"batch_size": 32})
    monkeypatch.setitem(METHODS, "averaging", batches)
    sweep.sweep(SUBJECT, ["averaging"], [50], GRID, VALIDATION, Store(tmp_path))
    assert finished() == 2 * first


def test_more_folds_than_the_groups_fill_are_refused_before_anything_is_run(tmp_path: Path) -> None:
    many = sweep.Validation(50, 40, 40)
    with refused(Code.DATA_INVALID, "domain one: its 108 training rows are too few for 40 folds"):
        sweep.sweep(SUBJECT, ["averaging"], [50], GRID, many, Store(tmp_path / "sweep"))
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_checks_all_jobs_before_it_runs_one(tmp_path: Path) -> None:
    bad = replace(GRID, blocks=[1, 3])
    with refused(Code.JOB_INVALID, "blocks (3) must divide dimension (8)"):
        sweep.sweep(SUBJECT, ["averaging", "fedot-b"], [50], bad, VALIDATION, Store(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("folds", "used"), [(1, 1), (3, 4), (3, 0)])
def test_a_sweep_needs_folds(tmp_path: Path, folds: int, used: int) -> None:
    with pytest.raises(VeilfedError, match="two folds are needed"):
        sweep.sweep(SUBJECT, ["averaging"], [50], GRID, sweep.Validation(50, folds, used), Store(tmp_path))


def row(rounds: int, c: float) -> dict[str, float]:
    return {"rounds": rounds, "G": 0.5, "P": 0.6, "C": c}


def test_of_settings_that_are_close_the_fewest_rounds_are_chosen() -> None:
    assert sweep.choose([row(4, 0.70), row(8, 0.75), row(12, 0.74)])["rounds"] == 8
    assert sweep.choose([row(4, 0.747), row(8, 0.749), row(12, 0.751)])["rounds"] == 8
    assert sweep.choose([row(8, 0.751), row(8, 0.752)]) == row(8, 0.752)
    assert sweep.choose([{"rounds": 4, "P": 0.7}, {"rounds": 8, "P": 0.8}])["rounds"] == 8


# What is refused, and what is not.


def refused(code: Code, words: str) -> Any:
    return pytest.raises(VeilfedError, check=lambda error: error.code is code and words in error.message)


def test_methods_are_named_or_refused() -> None:
    assert named("fedot, averaging") == ["averaging", "fedot"]
    assert named("all") == possible(named("all"), text_tower=True) == list(METHODS)
    assert not [name for name in possible(named("all"), text_tower=False) if METHODS[name].class_vectors]
    with refused(Code.INPUT_INVALID, "there is no method 'fedprox'"):
        named("fedot,fedprox")
    with refused(Code.INPUT_INVALID, "no method"):
        named(",")
    with refused(Code.INPUT_INVALID, "zero-shot needs vectors of the classes"):
        possible(["zero-shot"], text_tower=False)


def test_fedot_b_has_blocks_where_the_settings_do_not_say_how_many() -> None:
    """Else a study of other data would compare FEDOT with itself."""
    jobs = {
        name: job_of(SUBJECT, name, chosen, 50, ["one", "three"], ["two"]).strategy
        for name, chosen in {"fedot": Settings().of("fedot"), "fedot-b": Settings().of("fedot-b")}.items()
    }
    assert {name: getattr(strategy, "blocks", None) for name, strategy in jobs.items()} == {"fedot": 1, "fedot-b": 8}
    four = MethodSettings(strategy={"blocks": 4})
    strategy = job_of(SUBJECT, "fedot-b", four, 50, ["one", "three"], ["two"]).strategy
    assert getattr(strategy, "blocks", None) == 4


@pytest.mark.parametrize(
    ("method", "key"),
    [("averaging", "classes"), ("fedot-b", "dimension"), ("fedot", "blocks"), ("averaging", "transform")],
)
def test_what_is_not_for_settings_to_say_is_refused(method: str, key: str) -> None:
    with refused(Code.JOB_INVALID, f"method {method}: strategy.{key} is not a setting"):
        job_of(SUBJECT, method, MethodSettings(strategy={key: 1}), 50, ["one", "three"], ["two"])


def test_the_settings_that_are_told_are_those_of_the_jobs(whole: tuple[Results, Any]) -> None:
    told = {name: found["settings"] for name, found in whole[1]["methods"].items()}
    assert told["zero-shot"]["rounds"] == 0
    assert "classifier_rate" not in told["zero-shot"]
    assert "classifier_rate" not in told["fedclip-text"]
    assert told["averaging"] == {
        "rounds": 3,
        "classifier_rate": 5e-3,
        "batch_size": 32,
        "temperature": 20.0,
        "initial": "random",
        "init_norm": 0.1,
        "epochs": 1,
        "weighting": "uniform",
        "transform": "identity",
    }
    assert told["fedot"]["blocks"] == 1
    assert told["fedgh"]["header_rate"] == 5e-3  # the job's default: the settings do not say


@pytest.mark.parametrize(
    "option",
    [
        {"fm": "vit"},
        {"set_name": "pacs"},
        {"institutions": 3},
        {"characters": "digits"},
        {"prompts": Path("prompts.yaml")},
    ],
)
def test_what_is_for_a_folder_is_refused_beside_a_task(option: dict[str, Any]) -> None:
    with refused(Code.INPUT_INVALID, "is for --data; a task has its own"):
        choice(task="heart", **option)


def test_a_subject_is_a_task_or_a_folder_with_a_model(tmp_path: Path) -> None:
    with refused(Code.INPUT_INVALID, "say what to study"):
        choice()
    with refused(Code.INPUT_INVALID, "say what to study"):
        choice(task="heart", data=tmp_path)
    with refused(Code.INPUT_INVALID, "--data needs --fm"):
        choice(data=tmp_path)


def test_conclusions_by_hand_are_only_for_the_figures_that_they_are_about() -> None:
    every = list(TASKS)
    assert Asked(every, [50, 77, 98], [50, 77]).whole
    assert not Asked(every[:1], [50, 77, 98], [50, 77]).whole
    assert not Asked(every, [50, 77], [50, 77]).whole
    assert not Asked(every, [50, 77, 98], [50]).whole
    assert not Asked(every, [50, 77, 98], []).whole


def test_the_tasks_of_a_report_are_named_or_refused() -> None:
    assert tasks("heart, vader") == ["vader", "heart"]
    with refused(Code.INPUT_INVALID, "there is no task 'mnist'"):
        tasks("heart,mnist")
    with refused(Code.INPUT_INVALID, "no task is named"):
        tasks(",")


def test_characters_choose_the_classes_of_femnist_alone(tmp_path: Path) -> None:
    for name in (None, "pacs"):
        with refused(Code.INPUT_INVALID, "for the set femnist alone"):
            of_folder(tmp_path, "vit", tmp_path, tmp_path, set_name=name, characters="digits")


def test_counts_are_from_one_on() -> None:
    assert counts("5,10", "--rounds") == [5, 10]
    for text in ("0,3", "-5,10", "3,3", ""):
        with refused(Code.INPUT_INVALID, "--rounds"):
            counts(text, "--rounds")


def test_blocks_that_do_not_divide_are_refused_before_anything_is_trained(tmp_path: Path) -> None:
    bad = Settings(methods={"fedot-b": MethodSettings(rounds=1, strategy={"blocks": 3})})
    with refused(Code.JOB_INVALID, "blocks (3) must divide dimension (8)") as caught:
        run(SUBJECT, ["averaging", "fedot-b"], [50], bad, Store(tmp_path / "cells"))
    assert caught.value.message.startswith("method fedot-b: strategy")  # no line: the settings' text is not the job's
    assert caught.value.hint == "Correct the settings of the method."
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("methods: {fedprox: {rounds: 3}}", "there is no method 'fedprox'"),
        ("methods: {fedot: {rounds: -3}}", "rounds"),
        ("speed: 3", "speed"),
    ],
)
def test_bad_settings_are_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    with refused(Code.INPUT_INVALID, words):
        read_settings(path)


def test_the_settings_of_the_tasks_fit_their_methods() -> None:
    for task in TASKS.values():
        subject = replace(SUBJECT, dimension=task.dimension, classes=task.classes)
        chosen = built_in_settings(task.name)
        for name in chosen.methods:
            job_of(subject, name, chosen.of(name), 50, ["one"], ["two"])


def test_an_unknown_key_is_refused_by_name() -> None:
    with refused(Code.JOB_INVALID, "method averaging"):
        job_of(SUBJECT, "averaging", MethodSettings(rounds=1, strategy={"speed": 3}), 50, ["one"], ["two"])


def table(rows: int, labels: str = "ab") -> Samples:
    texts = [f"text {row}" for row in range(rows)]
    return Samples("text", texts, [labels[row % len(labels)] for row in range(rows)], texts)


def test_one_domain_cannot_be_left_out(tmp_path: Path) -> None:
    with refused(Code.INPUT_INVALID, "1 domain"):
        of_samples("lonely", "", {"one": table(10)}, "ab", LetterModel(), tmp_path)


def test_an_empty_domain_is_refused_by_name(tmp_path: Path) -> None:
    subject = of_samples("letters", "", {"one": table(10), "two": table(0)}, "ab", LetterModel(), tmp_path)
    with refused(Code.DATA_INVALID, "domain two: 0 samples"):
        run(subject, ["averaging"], [50], Settings(), Store(tmp_path / "cells"))


def test_a_class_that_is_missing_at_a_domain_is_no_hindrance(tmp_path: Path) -> None:
    subject = made_up(missing="one")
    assert CLASSES[-1] not in subject.domains["one"].samples.labels
    _, found = study(tmp_path, ["fedot-b", "fedgh"], subject=subject)
    for method in found["methods"].values():
        assert np.isfinite(np.array(method["matrix"])).all()


def test_a_folder_that_is_no_standard_set_is_refused(tmp_path: Path) -> None:
    with refused(Code.DATA_INVALID, "PACS is expected as"):
        of_folder(tmp_path, "vit", tmp_path, tmp_path, set_name="pacs")
    with refused(Code.INPUT_INVALID, "there is no set 'imagenet'"):
        of_folder(tmp_path, "vit", tmp_path, tmp_path, set_name="imagenet")


def test_data_of_another_kind_than_the_model_are_refused(tmp_path: Path) -> None:
    pictures = Samples("image", [b"1", b"2"], ["a", "b"], ["1", "2"])
    with refused(Code.INPUT_INVALID, "the data are images; the model letters is for texts"):
        of_samples("pictures", "", {"one": pictures, "two": pictures}, "ab", LetterModel(), tmp_path)


def test_each_text_is_embedded_once(tmp_path: Path) -> None:
    model = LetterModel()
    for _ in range(2):
        subject = of_samples("letters", "", {"one": table(10), "two": table(14)}, "ab", model, tmp_path)
        assert subject.class_vectors().shape == (2, 32)
    assert model.seen == 14 + 2


def test_a_part_gives_its_own_rows() -> None:
    part = Part(SUBJECT.domains["one"], np.array([3, 5]), np.array([8]))
    np.testing.assert_array_equal(part.training[0], SUBJECT.domains["one"].features[[3, 5]])
    np.testing.assert_array_equal(part.evaluation[1], SUBJECT.domains["one"].labels[[8]])
