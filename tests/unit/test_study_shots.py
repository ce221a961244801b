"""The page of one shot against many rounds: its tables have the figures of the studies, verdicts what they say."""

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.unit.test_study_fedopal import made_letters
from veilfed.errors import Code, VeilfedError
from veilfed_study import analytic, shot_page, shot_report, shot_tables
from veilfed_study.cli import app
from veilfed_study.methods import Settings, with_rounds
from veilfed_study.shot_tables import verdict
from veilfed_study.store import Store
from veilfed_study.variants import Grid, Ridge, Tuning, variants

ALL = ["afl", "fedcgs", "fedopal", *shot_report.TRAINED]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> shot_page.Found:
    """As the report has it, on fewer places."""
    subject = made_letters(tmp_path_factory.mktemp("cache"))
    store = Store(tmp_path_factory.mktemp("cells"))
    settings = with_rounds(Settings(split=50), shot_report.TRAINED, 2)
    seeds = [50, 77]
    ridges: list[Ridge] = ["gcv"]

    def run(methods: list[str], grid: Grid, rows: int | None = None) -> dict[str, Any]:
        return analytic.study(subject, methods, seeds, grid, settings, store, rows=rows)

    return shot_page.Found(
        run(["afl", "fedcgs", *shot_report.TRAINED], Grid([2, 4], [0.1, 1.0], ridges, [1, 5])),
        run(ALL, Grid([3], [0.1, 1.0], ridges, [1]), 40),
        run(["afl", "fedopal"], Grid([3], [0.1], ridges, [1], shot_report.SWEEP.tunings), 40),
    )


@pytest.fixture(scope="module")
def text(found: shot_page.Found) -> str:
    return shot_page.page([found], "the command", "What was written by hand.")


def cell(document: Any, name: str, clients: int, alpha: float) -> dict[str, Any]:
    (variant,) = [variant for variant in document["variants"] if variant["name"] == name]
    return next(one for one in variant["cells"] if (one["clients"], one["alpha"]) == (clients, alpha))


def row(text: str, start: str) -> list[str]:
    """The cells of the first line of a table that starts so."""
    line = next(line for line in text.splitlines() if line.startswith(f"| {start} |"))
    return [part.strip() for part in line.split("|")[2:-1]]


def test_the_page_has_every_part(text: str) -> None:
    assert text.startswith("# Results: one shot against many rounds\n\nWritten by `the command`;")
    assert "What was written by hand." in text
    assert "seeds (50, 77)" in text
    assert "have 2 rounds" in text
    for heading in ("## What was found", "## letters", "### FedOPAL beside AFL and FedCGS, 3 clients", "### All rows"):
        assert heading in text
    assert "On 40 training rows" in text
    sums, classifier = 8 * (32 * 33 // 2 + 2 * 32 + 2), 4 * 2 * 32
    (rounds,) = re.findall(r"once, is what it sends in (\d+) rounds", text)
    # Messages have names and shapes too.
    assert int(rounds) == pytest.approx(sums / classifier, rel=0.3)
    assert "(figures/analytic-letters.svg)" in text


def test_the_first_table_has_the_gaps_of_the_studies(found: shot_page.Found, text: str) -> None:
    """A gap of the sweep stands where it was measured, at one alpha."""
    values = row(text, "FedOPAL minus AFL")
    for value, alpha in zip(values, (0.1, 1.0), strict=True):
        mine, other = (
            cell(found.beside, name, 3, alpha)["accuracy"]["mean"] for name in (shot_page.OPAL, shot_page.AFL)
        )
        assert value.split(": ")[1].split()[0] == f"{100 * (mine - other):+.1f}"
    tuned, nothing = row(text, "three epochs of tuning minus one")
    assert tuned != nothing == "-"
    for start in ("prompts as drawn (mu infinite) minus AFL, which has none", "prompts tuned with mu 0 minus as drawn"):
        assert row(text, start)[0] != "-"


def test_rounds_are_compared_for_each_number_of_clients(found: shot_page.Found, text: str) -> None:
    for clients in (2, 4):
        values = row(text, f"letters, {clients} clients: AFL minus FEDOT(+B)")
        mine, other = (cell(found.whole, name, clients, 1.0)["accuracy"]["mean"] for name in ("afl-gcv-1", "fedot-b"))
        assert f"{100 * (mine - other):+.1f}" in values[1]


def test_costs_stand_beside_each_other(found: shot_page.Found) -> None:
    """Other methods have embedded their rows once; of variants that differ in lambda alone there is one line."""
    table = shot_tables.costs(found.beside, 3)
    lines = {line[0].split(",")[0] + (" again" if "reextract" in line[0] else ""): line[1:] for line in table.rows}
    assert lines.keys() == {"AFL", "FedCGS", "FedOPAL", "FedOPAL again", "averaging (w_l = I)", "FEDOT(+B)"}
    assert [lines[name][3:5] for name in ("AFL", "FEDOT(+B)", "FedOPAL")] == [["40", "0"], ["40", "0"], ["40", "40"]]
    assert [lines[name][0] for name in ("AFL", "FedOPAL", "FedOPAL again", "FEDOT(+B)")] == ["1", "1", "2", "2"]
    assert lines["AFL"][1] == f"{cell(found.beside, 'afl-gcv-1', 3, 1.0)['bytes_sent']:,}"
    assert lines["AFL"][5] == lines["FEDOT(+B)"][5] == f"{found.beside['embedding']['seconds']:.1f}"


def test_own_has_lines_only_for_what_was_measured(found: shot_page.Found) -> None:
    labels = [line[0] for line in shot_tables.accuracies(found.sweep, 3, "own").rows]
    assert len(labels) == 3  # AFL, and the first tuning in both variants
    assert len(shot_tables.accuracies(found.sweep, 3, "accuracy").rows) == 1 + 5


def test_a_verdict_is_level_where_zero_is_in_the_interval() -> None:
    assert verdict([0.012, -0.001, 0.02]) == "level: +1.2 (-0.1 to +2.0)"
    assert verdict([0.012, 0.001, 0.02]).startswith("above: ")
    assert verdict([-0.012, -0.02, -0.001]).startswith("below: ")
    assert verdict([0.0, 0.0, 0.0]).startswith("level: ")
    assert verdict(None) == "-"


def test_the_conclusions_by_hand_are_shown_with_their_figures_alone() -> None:
    seeds = (50, 77, 98)
    assert shot_report.Asked(("vader", "emoji"), seeds).whole
    for other in (
        shot_report.Asked(("vader",), seeds),
        shot_report.Asked(("vader", "emoji"), (50,)),
        shot_report.Asked(("vader", "emoji"), seeds, 100),
    ):
        assert not other.whole
    assert "--rows 100 --out results" in other.command


def test_what_it_compares_is_what_it_runs() -> None:
    """Every variant that the page's tables name is among those of the studies, or the page would have dashes."""
    beside = {one.name for one in variants(ALL, shot_report.BESIDE)}
    sweep = {one.name for one in variants(["afl", "fedopal"], shot_report.SWEEP)}
    whole = {one.name for one in variants(["afl", "fedcgs", *shot_report.TRAINED], shot_report.WHOLE)}
    for pairs, names in ((shot_page.BESIDE, beside), (shot_page.SWEPT, sweep), (shot_page.ROUNDS, whole)):
        assert {name for _, *both in pairs for name in both} <= names
    assert shot_report.BESIDE.tunings[0] == shot_report.SWEEP.tunings[0] == Tuning()


def test_tasks_without_many_rows_are_refused(tmp_path: Path) -> None:
    words = ["analytic-report", "--tasks", "vader,heart", "--out", str(tmp_path), "--page", str(tmp_path / "page.md")]
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, VeilfedError)
    assert result.exception.code is Code.INPUT_INVALID
    assert "heart" in result.exception.message
    assert not list(tmp_path.iterdir())
