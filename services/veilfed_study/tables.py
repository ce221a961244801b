"""The tables of a study, in Markdown and LaTeX; accuracies in per cent, as mean ± standard deviation over the seeds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from veilfed.jobs import TrainedSpec
from veilfed_study.summary import spread

__all__ = [
    "OURS",
    "Table",
    "all_tables",
    "clients",
    "cosine",
    "costs",
    "difference",
    "differences",
    "early_conflict",
    "figures",
    "gap",
    "geometry",
    "matrix",
    "percent",
    "settings",
    "shared_rounds",
]

Document = Mapping[str, Any]

OURS = "fedot-b"
# What all methods here have; shown where a job has something else.
USUAL = {name: field.default for name, field in TrainedSpec.model_fields.items()}

LATEX = {"&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "±": r"$\pm$", "^": r"\^{}"}


@dataclass(frozen=True)
class Table:
    """Text in rows; the first column is words, the others are numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        marks = ["---"] + ["---:"] * (len(self.columns) - 1)
        lines = [self.columns, marks, *self.rows]
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)

    def latex(self) -> str:
        """A tabular in the form of booktabs."""
        rows = "".join(_latex(row) for row in self.rows)
        kinds = "l" + "r" * (len(self.columns) - 1)
        return (
            f"% {self.title}\n\\begin{{tabular}}{{{kinds}}}\n\\toprule\n{_latex(self.columns)}\\midrule\n{rows}"
            "\\bottomrule\n\\end{tabular}\n"
        )


def _latex(row: Sequence[str]) -> str:
    return " & ".join("".join(LATEX.get(char, char) for char in cell) for cell in row) + " \\\\\n"


def percent(value: Mapping[str, Any]) -> str:
    """Of a mean with its spread; a dash where there is none."""
    if value["mean"] is None:
        return "-"
    spread = "" if value["sd"] is None else f" ± {100 * value['sd']:.1f}"
    return f"{100 * value['mean']:.1f}{spread}"


def _rows(document: Document) -> dict[str, Mapping[str, Any]]:
    """The methods, and what is shown beside them."""
    return {**document["methods"], **document.get("beside", {})}


def figures(document: Document) -> Table:
    """G, P and C of each method, and the areas under the ROC curve where there are two classes."""
    areas = all("areas" in found for found in _rows(document).values())
    columns = ["method", "G", "P", "C", *(["AUC, G", "AUC, P"] if areas else [])]
    rows = [
        [found["label"], *(percent(found[name]) for name in ("G", "P", "C"))]
        + ([percent(found["areas"][name]) for name in ("G", "P")] if areas else [])
        for found in _rows(document).values()
    ]
    return Table(f"{document['task']}: accuracy, per cent", columns, rows)


def matrix(document: Document, method: str) -> Table:
    """M: a row is the job that held this domain out, a column the domain that evaluates."""
    names = list(document["domains"])
    found = document["methods"][method]
    rows = [
        [f"without {name}", *("-" if value is None else f"{100 * value:.1f}" for value in row)]
        for name, row in zip(names, found["matrix"], strict=True)
    ]
    return Table(f"{document['task']}: {found['label']}, accuracy, per cent", ["", *names], rows)


def costs(document: Document) -> Table:
    """What an institution sends and gets in a round, and what it keeps."""
    names = ("numbers_sent", "bytes_sent", "bytes_received", "private_freedom")
    rows = [[found["label"], *(f"{found[name]:,}" for name in names)] for found in document["methods"].values()]
    columns = ["method", "numbers sent", "bytes sent", "bytes received", "private degrees of freedom"]
    return Table(f"{document['task']}: one institution in one round", columns, rows)


def geometry(document: Document) -> Table:
    """Gradient conflict, and condition numbers at the end, of the methods that have them."""
    rows = []
    known = [name for name, found in document["methods"].items() if found["conflict"] is not None]
    cosines = early_conflict(document, known)
    for name in known:
        found = document["methods"][name]
        condition = found["condition_number"]
        conditions = ["-", "-"] if condition is None else [f"{condition['mean']:.2f}", f"{condition['largest']:.2f}"]
        rows.append([found["label"], cosine(cosines[name]), *conditions])
    columns = ["method", "cosine of steps", "condition number, mean", "largest"]
    return Table(f"{document['task']}: gradient conflict and condition numbers", columns, rows)


def shared_rounds(document: Document, methods: Sequence[str]) -> int:
    """The rounds that all of these methods have."""
    return min((len(document["methods"][name]["conflict"]["by_round"]) for name in methods), default=0)


def early_conflict(document: Document, methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Method -> the mean cosine of steps over the rounds that all of them have, with its spread over the seeds.

    It changes from round to round, so means over unlike numbers of rounds could not be compared.
    """
    count = shared_rounds(document, methods)
    return {
        name: spread([sum(row[:count]) / count for row in document["methods"][name]["conflict"]["seeds"]])
        for name in methods
    }


def cosine(value: Mapping[str, Any]) -> str:
    """Of a mean with its spread."""
    return f"{value['mean']:.2f}" + ("" if value["sd"] is None else f" ± {value['sd']:.2f}")


def settings(document: Document) -> Table:
    """Rounds and parameters of each method's jobs; of those that all methods have, what is not the default."""
    keys = ["rounds", "classifier_rate", "transform_rate", "blocks"]
    rows = []
    for found in document["methods"].values():
        used = dict(found["settings"])
        if "header_rate" in used:  # FedGH: the aggregator trains w_g with this rate, the institution only a copy
            used["rate of the institution's copy of w_g"] = used.pop("classifier_rate")
        others = [
            f"{name} {value}"
            for name, value in used.items()
            if name not in keys and (name not in USUAL or value != USUAL[name])
        ]
        rows.append([found["label"], *(str(used.get(key, "-")) for key in keys), ", ".join(others) or "-"])
    return Table(f"{document['task']}: settings", ["method", "rounds", "rate of w_g", "rate of X", "r", "others"], rows)


def differences(document: Document) -> Table:
    """FEDOT(+B) minus each other method."""
    rows = [
        [found["label"], *(difference(document, OURS, name, figure) for figure in ("G", "P", "C"))]
        for name, found in document["methods"].items()
        if name != OURS
    ]
    return Table(f"{document['task']}: FEDOT(+B) minus, points", ["FEDOT(+B) minus", "G", "P", "C"], rows)


def difference(document: Document, one: str, other: str, figure: str) -> str:
    """one - other in points, with its interval; a dash where one of them has no such figure."""
    found = gap(document, one, other, figure)
    return "-" if found is None else "{:+.1f} ({:+.1f} to {:+.1f})".format(*(100 * value for value in found))


def gap(document: Document, one: str, other: str, figure: str) -> tuple[float, float, float] | None:
    """one - other: the mean over the seeds, and the ends of its interval (`resampling`)."""
    found = [document["methods"][name] for name in (one, other)]
    if any(method[figure]["mean"] is None for method in found):
        return None
    low, high = document["intervals"][one][other][figure]
    return found[0][figure]["mean"] - found[1][figure]["mean"], low, high


def clients(document: Document) -> Table:
    """G and P over the number of clients, of a study of scale."""
    rows = [
        [label, name, *(percent(row[name]) for row in values)]
        for label, values in document["methods"].items()
        for name in ("G", "P")
    ]
    columns = ["method", "", *(str(count) for count in document["clients"])]
    return Table(
        f"{document['task']}, {document['split']}: accuracy over the number of clients, per cent", columns, rows
    )


def all_tables(document: Document) -> dict[str, Table]:
    """Every table by the name of its file."""
    makers: dict[str, Callable[[Document], Table]] = {
        "figures": figures,
        "costs": costs,
        "geometry": geometry,
        "settings": settings,
        **({"differences": differences} if OURS in document["methods"] else {}),
    }
    found = {name: make(document) for name, make in makers.items()}
    return found | {f"matrix-{method}": matrix(document, method) for method in document["methods"]}
