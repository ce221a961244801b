"""FEDOT over several institutions in one process, on small made-up domains: what it gains, and what it never reads."""

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.local_fedot import Domain, Part, leave_one_out, run_job, study_parts
from benchmarks.select_rates import choose, fold_numbers, validation_parts
from client_agent.data.source import Samples
from veilfed.demo.study import Cell, Figures, job_spec
from veilfed.demo.tasks import Task

NAMES = ("one", "two", "three")
TASK = Task(
    name="made-up",
    title="three domains that are small rotations of each other",
    model="none",
    domains={name: {} for name in NAMES},
    classes=("a", "b", "c"),
    rounds=15,
    blocks=2,
    classifier_rate=5e-3,
    transform_rate=1e-2,
    dimension=8,
    batch_size=32,
)


def rotation(angle: float) -> NDArray[np.float64]:
    """Turns the first axis towards the second, and so on, inside the first of two blocks."""
    turn = np.eye(8)
    turn[:2, :2] = turn[2:4, 2:4] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    return turn


def domain(name: str, angle: float) -> Domain:
    """Classes are directions 0, 1 and 2, turned by `angle`; 90 groups of two equal-class samples."""
    rng = np.random.default_rng(abs(int(1000 * angle)))
    labels = np.arange(180) // 2 % 3
    features = (np.eye(3, 8)[labels] + rng.normal(0, 0.25, (180, 8))) @ rotation(angle).T
    groups = [f"{name}:{row // 2}" for row in range(180)]
    samples = Samples("text", [""] * 180, [TASK.classes[label] for label in labels], groups)
    return Domain(samples, features.astype(np.float32), labels.astype(np.int64))


DOMAINS = {name: domain(name, angle) for name, angle in zip(NAMES, (-0.9, 0.0, 0.9), strict=True)}


def test_the_private_transform_beats_the_identity_where_domains_are_rotations() -> None:
    parts = study_parts(TASK, DOMAINS, 50)
    fedot = Figures(leave_one_out(TASK, parts, 50, "orthogonal", [TASK.rounds])[TASK.rounds])
    baseline = Figures(leave_one_out(TASK, parts, 50, "identity", [TASK.rounds])[TASK.rounds])
    assert fedot.personalisation > baseline.personalisation + 0.03
    assert fedot.comprehensive > baseline.comprehensive


def test_a_mark_in_the_middle_is_the_end_of_a_shorter_job() -> None:
    parts = study_parts(TASK, DOMAINS, 77)
    both = leave_one_out(TASK, parts, 77, "orthogonal", [3, 6])
    np.testing.assert_array_equal(both[3], leave_one_out(TASK, parts, 77, "orthogonal", [3])[3])


def test_a_job_gives_the_same_model_again_bit_for_bit() -> None:
    spec = job_spec(TASK, Cell("two", 50, "orthogonal"), 4)
    parts = study_parts(TASK, DOMAINS, 50)
    one, two = run_job(spec, parts, [4]), run_job(spec, parts, [4])
    assert one.model["classifier"].tobytes() == two.model["classifier"].tobytes()
    assert one.states["three"].to_bytes() == two.states["three"].to_bytes()
    assert set(one.states) == {"one", "three"}  # who is held out has no private state


def test_validation_sees_no_test_row_and_every_training_row_once() -> None:
    whole = study_parts(TASK, DOMAINS, 98)
    seen: dict[str, list[int]] = {name: [] for name in NAMES}
    for parts in validation_parts(TASK, DOMAINS, 98, folds=4, used=4):
        for name, part in parts.items():
            assert not set(part.train) & set(part.held)
            assert set(part.train) | set(part.held) == set(whole[name].train)
            groups = part.domain.samples.groups
            assert not {groups[row] for row in part.train} & {groups[row] for row in part.held}
            seen[name] += part.held.tolist()
    for name in NAMES:
        assert sorted(seen[name]) == sorted(whole[name].train.tolist())


def test_folds_are_even_within_each_class() -> None:
    part = study_parts(TASK, DOMAINS, 50)["one"]
    numbers = fold_numbers(part, 3, 50)
    for label in range(3):
        counts = np.bincount(numbers[part.domain.labels[part.train] == label], minlength=3)
        assert counts.max() - counts.min() <= 2  # one group of two


def row(rounds: int, c: float, *, blocks: int = 2, p_gain: float = 0.01, c_gain: float = 0.01) -> dict[str, object]:
    fedot, baseline = {"G": 0.5, "P": 0.6, "C": c}, {"G": 0.5, "P": 0.6 - p_gain, "C": c - c_gain}
    return {"rounds": rounds, "blocks": blocks, "fedot": fedot, "baseline": baseline}


def test_the_choice_is_the_best_that_is_above_the_baseline() -> None:
    assert choose([row(4, 0.70), row(8, 0.75), row(12, 0.74)])["rounds"] == 8
    assert choose([row(4, 0.70), row(8, 0.80, p_gain=-0.01), row(12, 0.75)])["rounds"] == 12
    assert choose([row(4, 0.70), row(8, 0.80, c_gain=-0.01), row(12, 0.75)])["rounds"] == 12


def test_of_settings_that_are_close_the_cheapest_is_chosen() -> None:
    assert choose([row(4, 0.747), row(8, 0.749), row(12, 0.751)])["rounds"] == 8
    assert choose([row(8, 0.751), row(8, 0.752), row(8, 0.752, blocks=1)]) == row(8, 0.752)


def test_without_a_setting_above_the_baseline_there_is_no_choice() -> None:
    with pytest.raises(SystemExit):
        choose([row(4, 0.7, c_gain=0.0)])


def test_a_part_gives_its_own_rows() -> None:
    part = Part(DOMAINS["one"], np.array([3, 5]), np.array([8]))
    np.testing.assert_array_equal(part.training[0], DOMAINS["one"].features[[3, 5]])
    np.testing.assert_array_equal(part.evaluation[1], DOMAINS["one"].labels[[8]])
