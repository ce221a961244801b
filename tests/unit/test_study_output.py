"""What studies show: tables, plots, the page of results; many clients; the ridge on raw columns."""

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.support.studies import CLASSES, NAMES, made_up
from veilfed.errors import Code, VeilfedError
from veilfed_study import page, plots, tables
from veilfed_study.methods import METHODS, MethodSettings, Settings
from veilfed_study.parts import split_parts
from veilfed_study.report import keep
from veilfed_study.resampling import DRAWS, drawn, interval, matrices, pieces
from veilfed_study.runner import run
from veilfed_study.scale import Division, clients_of, scale
from veilfed_study.store import Store
from veilfed_study.summary import document
from veilfed_study.tabular import columns, ridge

SEEDS = [50, 77]
SUBJECT = made_up(classes=2)
SETTINGS = Settings(
    methods={
        name: MethodSettings(rounds=2, strategy={"blocks": 2} if "blocks" in METHODS[name].rates else {})
        for name in METHODS
    }
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A study of every method."""
    results = run(SUBJECT, list(METHODS), SEEDS, SETTINGS, Store(tmp_path_factory.mktemp("cells")))
    return document(SUBJECT, list(METHODS), SEEDS, SETTINGS, results)


def only(found: dict[str, Any], *methods: str) -> dict[str, Any]:
    return {**found, "methods": {name: found["methods"][name] for name in methods}}


def test_tables_have_the_figures(found: dict[str, Any]) -> None:
    markdown = tables.figures(found).markdown()
    mine = found["methods"]["fedot-b"]
    line = next(line for line in markdown.splitlines() if line.startswith("| FEDOT(+B) |"))
    assert f"{100 * mine['C']['mean']:.1f} ± {100 * mine['C']['sd']:.1f}" in line
    assert f"{100 * mine['areas']['G']['mean']:.1f}" in line
    assert re.search(r"\| FEDOT, all local \| - \| [\d.]+ ± [\d.]+ \| - \|", markdown)
    assert re.search(
        r"\| FEDOT, all local \| - \| [-+][\d.]+ \(.* to .*\) \| - \|", tables.differences(found).markdown()
    )
    matrix = tables.matrix(found, "fedot-b").markdown()
    assert f"{100 * mine['matrix'][1][0]:.1f}" in matrix.splitlines()[3]
    shown = tables.settings(found).markdown()
    assert "| FedLT | 2 | 0.005 | 0.0005 | - | - |" in shown
    assert "| FEDOT(+B) | 2 | 0.005 | 0.0005 | 2 | transform orthogonal |" in shown
    assert re.search(r"\| FedGH \| 2 \| - \| 0.0005 \| 1 \| .*rate of the institution's copy of w_g 0.005", shown)
    costs = tables.costs(found).markdown()
    assert f"| FEDOT | {2 * 8} | " in costs


def test_tables_in_latex_have_equal_rows_and_nothing_unescaped(found: dict[str, Any]) -> None:
    for table in tables.all_tables(found).values():
        text = table.latex()
        rows = [line for line in text.splitlines() if line.endswith("\\\\")]
        assert len(rows) == len(table.rows) + 1
        assert {row.count("&") for row in rows} == {len(table.columns) - 1}
        assert not re.search(r"(?<!\\)[_%#]", "".join(rows))
        assert "±" not in text


def test_a_study_is_kept_with_tables_and_plots(found: dict[str, Any], tmp_path: Path) -> None:
    few = only(found, "averaging", "all-local")
    keep(few, tmp_path)
    names = {path.name for path in (tmp_path / "plots").iterdir()}
    assert names == {
        f"{name}.{ending}"
        for name in ("accuracy", "conflict", "matrix-averaging", "matrix-all-local")
        for ending in ("png", "svg")
    }
    for path in (tmp_path / "plots").glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")
    shown = "".join(ET.parse(tmp_path / "plots" / "matrix-averaging.svg").getroot().itertext())  # noqa: S314  ours
    for value in np.ravel(few["methods"]["averaging"]["matrix"]):
        assert f"{100 * value:.1f}" in shown
    assert (tmp_path / "tables" / "geometry.tex").exists()


def test_equal_figures_give_equal_plots(found: dict[str, Any], tmp_path: Path) -> None:
    for name in ("one", "two"):
        plots.write(plots.all_plots(only(found, "averaging", "fedot"))["accuracy"], tmp_path, name, ("svg",))
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_the_page_has_every_task_and_no_figure_that_was_not_computed(found: dict[str, Any]) -> None:
    other = {**found, "task": "other", "methods": {k: v for k, v in found["methods"].items() if "text" not in k}}
    text = page.page([found, other], [], "command", "## Why\n")
    assert "## made-up" in text
    assert "## other" in text
    assert text.count("| FEDOT(+B) |") >= 5
    assert "no text tower" in text
    changed = {name: {**values, "C": shifted(values["C"])} for name, values in found["methods"].items()}
    assert page.page([{**found, "methods": changed}], [], "command", "") != page.page([found], [], "command", "")


def shifted(value: dict[str, Any]) -> dict[str, Any]:
    return value if value["mean"] is None else {**value, "mean": value["mean"] / 2}


def test_a_difference_has_its_interval() -> None:
    methods = {"one": {"C": {"mean": 0.5}}, "two": {"C": {"mean": 0.4}}}
    intervals = {"one": {"two": {"C": [0.1025, 0.1975]}}}
    found = {"methods": methods, "intervals": intervals}
    assert tables.difference(found, "one", "two", "C") == "+10.0 (+10.2 to +19.8)"
    alone = {"one": methods["one"], "two": {"C": {"mean": None}}}
    assert tables.difference({"methods": alone}, "one", "two", "C") == "-"


def test_an_interval_leaves_out_two_and_a_half_of_a_hundred_on_each_side() -> None:
    draws = np.linspace(0.1, 0.2, 1001)
    np.testing.assert_allclose(interval(draws, 0 * draws), [0.1025, 0.1975])


def test_whoever_leads_by_less_than_the_interval_is_level(found: dict[str, Any]) -> None:
    def lead(low: float, high: float) -> str:
        rows = {"fedot-b": {"label": "B", "C": {"mean": 0.6}}, "fedlt": {"label": "LT", "C": {"mean": 0.5}}}
        made = {"methods": rows, "intervals": {"fedot-b": {"fedlt": {"C": [low, high]}}}}
        return page._lead(made, "C").split(":")[0]

    assert (lead(0.05, 0.15), lead(-0.05, 0.15), lead(0.0, 0.15)) == ("yes", "level", "level")


def test_steps_conflict_least_in_the_order_of_the_paper_over_the_rounds_that_all_have() -> None:
    def order(*rows: list[list[float]]) -> str:
        names = ("fedot", "fedlt", "fedadapter")
        methods = {
            name: {"conflict": {"by_round": seeds[0], "seeds": seeds}} for name, seeds in zip(names, rows, strict=True)
        }
        return page._order({"methods": methods})

    # The third round of the first is not compared: the others have two.
    last = [[0.1, 0.1], [0.2, 0.2]]
    assert order([[0.8, 0.8, -1], [0.9, 0.9, -1]], [[0.5, 0.5], [0.6, 0.6]], last) == (
        "yes: 0.85 ± 0.07, 0.55 ± 0.07, 0.15 ± 0.07 (rounds 1 to 2)"
    )
    assert order([[0.55, 0.55], [0.65, 0.65]], [[0.5, 0.5], [0.6, 0.6]], last).startswith("level")
    assert order([[0.3, 0.3], [0.4, 0.4]], [[0.5, 0.5], [0.6, 0.6]], last).startswith("no")


def test_intervals_of_two_methods_are_on_the_same_samples(found: dict[str, Any]) -> None:
    """The interval is narrower than that of one method alone, and the other way round it is the same."""
    intervals = found["intervals"]
    low, high = intervals["fedot"]["fedot-b"]["P"]
    assert low <= tables.gap(found, "fedot", "fedot-b", "P")[0] <= high  # type: ignore[index]
    np.testing.assert_allclose(intervals["fedot-b"]["fedot"]["P"], [-high, -low])
    assert intervals["all-local"]["fedot"].keys() == {"P"}
    parts = [split_parts(SUBJECT.domains, CLASSES, 50)]
    hits = [[{name: [row // 2 % 2 for row in range(len(part.held))] for name, part in parts[0].items()}] * 3]
    both = drawn(parts, {"one": hits, "two": hits}, 50)
    assert interval(both["one"][:, 0, 1], both["two"][:, 0, 1]) == [0, 0]
    assert np.std(both["one"][:, 0, 1]) > 0.01


def test_equal_weights_would_give_the_matrix_itself() -> None:
    parts = split_parts(SUBJECT.domains, CLASSES, 50)
    rng = np.random.default_rng(1)
    hits = [{name: rng.integers(0, 2, len(part.held)).tolist() for name, part in parts.items()} for _ in NAMES]
    even = {name: np.full((2, len(part.held)), 1 / len(part.held)) for name, part in parts.items()}
    expected = [[np.mean(row[name]) for name in NAMES] for row in hits]
    np.testing.assert_allclose(matrices(even, hits), [expected, expected])


def test_draws_move_with_the_seeds_and_stay_where_all_agree() -> None:
    parts = [split_parts(SUBJECT.domains, CLASSES, 50)] * 3
    right, wrong = (
        [{name: [value] * len(part.held) for name, part in parts[0].items()} for _ in NAMES] for value in (1, 0)
    )
    found = drawn(parts, {"all": [right, right, right], "one": [right, wrong, wrong]}, 50)
    assert found["all"].shape == (DRAWS, 3, 3)
    np.testing.assert_allclose(found["all"], 1)
    assert abs(found["one"].mean() - 1 / 3) < 0.01
    assert found["one"][:, 0, 0].std() > 0.2


def test_weights_are_of_groups_and_add_up() -> None:
    parts = split_parts(SUBJECT.domains, CLASSES, 50)
    count = 0
    for (found,) in pieces([parts], 50):
        for name, weights in found.items():
            assert weights.shape[1] == len(parts[name].held)
            np.testing.assert_allclose(weights.sum(axis=1), 1)
            groups = [parts[name].domain.samples.groups[row] for row in parts[name].held]
            assert len(np.unique(weights[0])) == len(set(groups))
        count += len(weights)
    assert count == DRAWS


def test_a_row_that_two_seeds_test_has_one_weight() -> None:
    """Splits of a seed each: weights of the rows that both test are in the same proportions."""
    first, second = (split_parts(SUBJECT.domains, CLASSES, seed) for seed in (50, 77))
    one, other = next(pieces([first, second], 50))
    for name in NAMES:
        shared = np.intersect1d(first[name].held, second[name].held)
        assert 0 < len(shared) < len(first[name].held)
        rows = [
            weights[name][0, np.searchsorted(parts[name].held, shared)]
            for weights, parts in ((one, first), (other, second))
        ]
        np.testing.assert_allclose(rows[0] / rows[0].sum(), rows[1] / rows[1].sum())


# Many clients.


@pytest.mark.parametrize("division", [Division("by-domain"), Division("dirichlet", 0.3)], ids=lambda made: made.split)
def test_clients_keep_the_sides_of_the_split_and_share_no_row(division: Division) -> None:
    parts = split_parts(SUBJECT.domains, CLASSES, 50)
    others = [parts["one"], parts["three"]]
    clients, left_out = clients_of(others, 20, division, 50)
    assert len(clients) == 20
    for side in ("training", "evaluation"):
        rows = [row for client in clients.values() for row in map(bytes, getattr(client, side)[0])]
        known = {row for part in others for row in map(bytes, getattr(part, side)[0])}
        assert len(rows) == len(set(rows))
        assert set(rows) <= known
        assert left_out or set(rows) == known
    for client in clients.values():
        assert len(client.train)
        assert len(client.held)
        if division.split == "by-domain":
            assert len({client.domain.samples.groups[row].split(":")[0] for row in client.train}) == 1


def test_no_client_trains_on_a_group_that_is_tested_elsewhere() -> None:
    """Domains with the same groups, as one icon in several styles."""
    shared = {
        name: replace(domain, samples=replace(domain.samples, groups=[str(row // 2) for row in range(180)]))
        for name, domain in SUBJECT.domains.items()
    }
    parts = split_parts(shared, CLASSES, 50)
    tested = {str(row // 2) for row in parts["two"].held}
    for division in (Division("by-domain"), Division("dirichlet", 5.0)):
        clients, _ = clients_of([parts["one"], parts["three"]], 10, division, 50)
        trained = {client.domain.samples.groups[row] for client in clients.values() for row in client.train}
        assert trained
        assert not trained & tested


def test_scale_gives_figures_for_each_number_of_clients(tmp_path: Path) -> None:
    told: list[str] = []
    arguments = (SUBJECT, ["averaging", "all-local", "fedot-b"], [50], [1, 6], Division("by-domain"), SETTINGS)
    found = scale(*arguments, Store(tmp_path), told.append)
    assert len(told) == 3 * 3 * 2
    assert found["clients"] == [1, 6]
    for label, rows in found["methods"].items():
        assert len(rows) == 2
        assert all(0 <= row["P"]["mean"] <= 1 for row in rows)
        assert all((row["G"]["mean"] is None) == (label == "FEDOT, all local") for row in rows)
    assert scale(*arguments, Store(tmp_path)) == found
    assert "| 6 |" in tables.clients(found).markdown()
    text = page.many_clients([found])
    assert "made-up, by-domain" in text
    assert "FEDOT(+B): rounds 2, rate of w_g 0.005, rate of X 0.0005, r 2" in text
    plots.write(plots.scale_curves(found), tmp_path, "scale")


def test_as_many_clients_take_part_as_is_said_and_the_others_are_counted() -> None:
    """270 groups of two for 40 clients: some have no training or no test row."""
    parts = list(split_parts(SUBJECT.domains, CLASSES, 50).values())
    clients, left_out = clients_of(parts, 40, Division("dirichlet", 0.5), 50)
    assert len(clients) == 40
    assert left_out > 0


def test_more_clients_than_can_be_made_are_refused(tmp_path: Path) -> None:
    for count in (100, 1000):
        with pytest.raises(VeilfedError) as caught:
            scale(SUBJECT, ["averaging"], [50], [count], Division("by-domain"), SETTINGS, Store(tmp_path))
        assert caught.value.code is Code.DATA_INVALID
    with pytest.raises(VeilfedError, match="there is no division 'random'"):
        Division.named("random", 1.0)


def test_many_clients_are_checked_before_one_job_is_run(tmp_path: Path) -> None:
    bad = Settings(methods={"fedot-b": MethodSettings(rounds=1, strategy={"blocks": 3})})
    with pytest.raises(VeilfedError, match="must divide dimension"):
        scale(SUBJECT, ["averaging", "fedot-b"], [50], [4], Division("by-domain"), bad, Store(tmp_path))
    assert list(tmp_path.iterdir()) == []


# The ridge on raw columns.


def test_ridge_is_the_solution_of_its_normal_equations() -> None:
    rng = np.random.default_rng(3)
    rows, positive = rng.normal(2, 3, (60, 4)), rng.random(60) < 0.4
    z, y = (rows - rows.mean(axis=0)) / rows.std(axis=0), np.where(positive, 1.0, -1.0)
    padded = np.vstack([z, np.sqrt(5.0) * np.eye(4)])
    weights, *_ = np.linalg.lstsq(padded, np.concatenate([y - y.mean(), np.zeros(4)]), rcond=None)
    np.testing.assert_allclose(ridge(rows, positive, 5.0)(rows), z @ weights + y.mean(), atol=1e-12)


def test_missing_values_count_as_the_training_mean() -> None:
    rng = np.random.default_rng(4)
    rows, positive = rng.normal(0, 1, (40, 3)), rng.random(40) < 0.5
    rows[:5, 1] = np.nan
    rows[:, 2] = np.nan  # not measured anywhere
    fit = ridge(rows, positive, 1.0)
    other = np.array([[0.3, np.nan, np.nan], [0.3, np.nanmean(rows[:, 1]), 7.0]])
    assert np.isfinite(fit(rows)).all()
    assert fit(other)[0] == pytest.approx(fit(other)[1])


def test_columns_of_records() -> None:
    words = {name: ["x", "y"] for name in ("sex", "cp", "restecg", "slope", "thal")}
    table = pd.DataFrame(
        {
            **{name: [1.0, 2.0] for name in ("age", "thalch", "oldpeak", "ca")},
            "trestbps": [0.0, 120.0],
            "chol": [200.0, 0.0],
            "fbs": [True, None],
            "exang": [True, False],
            **words,
        }
    )
    found = columns(table)
    assert found.shape == (2, 6 + 6 + 7 * 2)
    assert np.isnan(found).sum() == 2  # the zeros of blood pressure and cholesterol
    assert found[:, 6:12].sum() == 2


def test_names_of_the_support_are_those_of_the_domains() -> None:
    assert tuple(SUBJECT.domains) == NAMES
