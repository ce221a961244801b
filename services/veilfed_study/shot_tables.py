"""The tables of the study of one shot against many rounds."""

from collections.abc import Mapping, Sequence
from typing import Any

from veilfed_study.tables import Table, percent

__all__ = ["accuracies", "costs", "gap", "gaps", "label_of", "verdict"]

Document = Mapping[str, Any]

FIGURES = {"accuracy": "accuracy, per cent", "own": "accuracy on each client's own mix of classes, per cent"}


def _cells(document: Document, clients: int) -> list[tuple[Mapping[str, Any], list[Mapping[str, Any]]]]:
    """Each variant with its cells over alpha."""
    return [
        (variant, [cell for cell in variant["cells"] if cell["clients"] == clients]) for variant in document["variants"]
    ]


def _alphas(document: Document) -> list[str]:
    return [f"alpha {alpha:g}" for alpha in document["alphas"]]


def accuracies(document: Document, clients: int, figure: str, costly: bool = True) -> Table:
    """`accuracy` or `own` of each variant over alpha; with the costs at the largest one, if `costly`."""
    rows = []
    for variant, cells in _cells(document, clients):
        if all(cell[figure]["mean"] is None for cell in cells) and figure == "own":
            continue  # it was not asked for
        last = cells[-1]
        costs = [
            str(last["rounds"]),
            f"{last['bytes_sent']:,}",
            f"{last['bytes_received']:,}",
            f"{last['seconds']:.2f}",
        ]
        rows.append([variant["label"], *(percent(cell[figure]) for cell in cells), *(costs if costly else [])])
    columns = ["method", *_alphas(document)]
    if costly:
        columns += ["rounds", "bytes sent", "bytes received", "seconds"]
    return Table(f"{document['task']}, {clients} clients: {FIGURES[figure]}", columns, rows)


def costs(document: Document, clients: int) -> Table:
    """What each variant costs at the largest alpha; one line for variants that cost the same but for their lambda."""
    rows, seen = [], set()
    embedding = document["embedding"]
    for variant, cells in _cells(document, clients):
        kind = variant["method"], variant["tuning"], variant["reextract"]
        if kind in seen:
            continue
        seen.add(kind)
        cell = cells[-1]
        prompted = variant["method"] == "fedopal"
        embeddings = cell["inputs"] - cell["gradients"] if prompted else embedding["inputs"]
        rows.append(
            [
                variant["label"],
                str(cell["rounds"]),
                f"{cell['bytes_sent']:,}",
                f"{cell['bytes_received']:,}",
                f"{embeddings:,.0f}",
                f"{cell['gradients']:,.0f}",
                f"{cell['model_seconds'] if prompted else embedding['seconds']:.1f}",
                f"{cell['seconds']:.2f}",
            ]
        )
    columns = ["method", "rounds", "bytes sent", "bytes received", "embeddings", "gradients"]
    return Table(
        f"{document['task']}, {clients} clients: costs",
        [*columns, "seconds of the model", "seconds besides"],
        rows,
    )


def gaps(document: Document, clients: int, pairs: Sequence[tuple[str, str]]) -> Table:
    """The first variant minus the second, in points, over alpha; variants by name."""
    rows = [
        [
            f"{label_of(document, one)} minus {label_of(document, other)}",
            *(verdict(gap(document, clients, alpha, one, other)) for alpha in document["alphas"]),
        ]
        for one, other in pairs
    ]
    return Table(f"{document['task']}, {clients} clients: differences, points", ["", *_alphas(document)], rows)


def label_of(document: Document, name: str) -> str:
    """What a variant is called."""
    return str(next(variant["label"] for variant in document["variants"] if variant["name"] == name))


def gap(document: Document, clients: int, alpha: float, one: str, other: str) -> Sequence[float] | None:
    """The accuracy of one minus that of the other and the ends of its interval; None where one has none."""
    for place in document["gaps"]:
        if (place["clients"], place["alpha"]) == (clients, alpha):
            found: Sequence[float] | None = place["of"].get(one, {}).get(other)
            return found
    return None


def verdict(found: Sequence[float] | None) -> str:
    """Level where zero is in the interval, which could as well be the truth then."""
    if found is None:
        return "-"
    mean, low, high = found
    word = "level" if low <= 0 <= high else "above" if mean > 0 else "below"
    return f"{word}: {100 * mean:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"
