"""The table, the plot and the page of accuracy against epsilon."""

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from veilfed.files import write_atomic
from veilfed_study import plots
from veilfed_study.tables import Table, percent

__all__ = ["figure", "keep", "page", "table", "write_page"]

Document = Mapping[str, Any]

# What the conclusions by hand (`why-privacy.md`) are about.
TASK, SEEDS, COUNTS, EPSILONS = "vader", [50, 77, 98], [4, 40], [16.0, 8.0, 4.0, 2.0, 1.0, 0.5]


def table(document: Document, institutions: int, name: str = "accuracy") -> Table:
    """`accuracy` or `own` of each mechanism over epsilon."""
    rows = [
        [row["label"], *(percent(cell[name]) for cell in row["cells"])]
        for row in document["rows"]
        if row["institutions"] == institutions and (name == "accuracy" or _has_own(document, row))
    ]
    what = "accuracy, per cent" if name == "accuracy" else "accuracy with the institution's private state, per cent"
    columns = ["method, mode", "no noise", *(f"epsilon {value:g}" for value in document["epsilons"])]
    return Table(f"{document['task']}, {institutions} institutions: {what}", columns, rows)


def _has_own(document: Document, row: Mapping[str, Any]) -> bool:
    """Whether institutions keep something of their own."""
    return bool(document["settings"][row["mechanism"]]["strategy"]["name"] == "fedot")


def multipliers(document: Document) -> Table:
    """The noise multiplier of each mechanism, which does not depend on the number of institutions."""
    first = document["rows"][0]["institutions"]
    rows = [
        [row["label"], *(f"{cell['noise_multiplier']:.3g}" for cell in row["cells"][1:])]
        for row in document["rows"]
        if row["institutions"] == first
    ]
    columns = ["method, mode", *(f"epsilon {value:g}" for value in document["epsilons"])]
    return Table("noise multipliers", columns, rows)


def figure(document: Document) -> Figure:
    """Accuracy over epsilon, for each number of institutions."""
    return plots.epsilon_curves(document)


def counts(document: Document) -> list[int]:
    return list(dict.fromkeys(row["institutions"] for row in document["rows"]))


def keep(document: Document, out: Path) -> list[Table]:
    """OUT/tables/privacy-INSTITUTIONS.md and .tex, OUT/plots/privacy.png and .svg; the tables come back."""
    for folder in (out / "tables", out / "plots"):
        folder.mkdir(parents=True, exist_ok=True)
    found = []
    for institutions in counts(document):
        made = table(document, institutions)
        found.append(made)
        for ending, text in (("md", made.markdown()), ("tex", made.latex())):
            write_atomic(out / "tables" / f"privacy-{institutions}.{ending}", text.encode(), mode=0o644)
    plots.write(figure(document), out / "plots", "privacy")
    return found


def whole(document: Document) -> bool:
    """Whether these are the figures that the conclusions by hand are about."""
    asked = document["task"], document["seeds"], counts(document), document["epsilons"]
    return asked == (TASK, SEEDS, COUNTS, EPSILONS)


def write_page(document: Document, target: Path, command: str) -> None:
    """The page, and its plot in the folder `figures` beside it. Raises VeilfedError(FILE_UNUSABLE)."""
    folder = target.parent / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    plots.write(figure(document), folder, f"{document['task']}-privacy", ("svg",))
    why = files("veilfed_study").joinpath("why-privacy.md").read_text(encoding="utf-8") if whole(document) else ""
    write_atomic(target, page(document, command, why).encode(), mode=0o644)


def page(document: Document, command: str, why: str) -> str:
    """The whole page. `why` is what is said to the figures by hand."""
    seeds = ", ".join(str(seed) for seed in document["seeds"])
    lines = [
        "# Results: accuracy against epsilon",
        f"Written by `{command}`; every table and plot is computed by it, what is said to them in words is written by "
        "hand.",
        f"{document['title'][:1].upper()}{document['title'][1:]}; {document['model']}, d = {document['dimension']}, "
        f"{document['training_rows']:,} training rows of all institutions together. Accuracy is the mean over the "
        "institutions of the right answers on their own test rows, with the model that the last round publishes and "
        f"nothing private. Mean ± standard deviation over the seeds ({seeds}), which draw the split, first values, "
        f"batches and the noise. Epsilon is of the whole job, at delta {document['delta']:g}, by the accountant of "
        "[differential privacy](differential-privacy.md), which says what each mode protects: the rows of `update` "
        "hide all that an institution trains on, the others one sample, so their epsilons do not compare. `Of the "
        "sum`: each institution adds its share of the noise only, as it may where the aggregator sees sums alone "
        "(secure aggregation with nobody colluding); the protected thing is then hidden from who sees the sum. A job "
        "divides the noise of `statistics` so, if its quorum is everybody; in mode `update` each institution adds all "
        "of it, so those rows of `of the sum` show what sharing would bring, and no job has it.",
        why.rstrip("\n"),
        f"![{document['task']}: accuracy over epsilon](figures/{document['task']}-privacy.svg)",
    ]
    for institutions in counts(document):
        lines += [f"## {institutions} institutions", table(document, institutions).markdown()]
        lines += [
            "FEDOT, each institution with its own private transform:",
            table(document, institutions, "own").markdown(),
        ]
    lines += ["## Noise and settings", "Noise multipliers (standard deviation over sensitivity):"]
    lines += [multipliers(document).markdown(), *_settings(document)]
    return "\n\n".join(line.rstrip("\n") for line in lines if line) + "\n"


def _settings(document: Document) -> Sequence[str]:
    rows = []
    for row in document["rows"]:
        used = document["settings"][row["mechanism"]]
        said = {**used["strategy"], **used["privacy"]}
        del said["name"], said["mode"]
        if row["institutions"] == document["rows"][0]["institutions"] and said:
            rows.append([row["label"], str(used["rounds"]), ", ".join(f"{key} {value}" for key, value in said.items())])
    return [Table("settings", ["method, mode", "rounds", "settings"], rows).markdown()]
