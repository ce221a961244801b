"""The plots of a study as PNG and SVG: equal figures give equal files. Needs the extra `study` (matplotlib)."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from veilfed.files import write_atomic

__all__ = [
    "accuracy_by_round",
    "all_plots",
    "alpha_curves",
    "conflict_by_round",
    "epsilon_curves",
    "heat_map",
    "scale_curves",
    "write",
]

Document = Mapping[str, Any]

SETTINGS: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "veilfed", "font.size": 9}
ENDINGS = ("png", "svg")
LINES = ("-", "--", ":", "-.")


def _figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained")


def heat_map(document: Document, method: str) -> Figure:
    """The matrix M of a method."""
    found, names = document["methods"][method], list(document["domains"])
    matrix = np.array(found["matrix"], dtype=float)
    figure = _figure(0.9 * len(names) + 2.5, 0.7 * len(names) + 1.5)
    axes = figure.subplots()
    image = axes.imshow(100 * matrix, cmap="viridis")
    middle = 50 * (np.nanmin(matrix) + np.nanmax(matrix))
    for (row, column), value in np.ndenumerate(100 * matrix):
        if np.isfinite(value):
            axes.text(column, row, f"{value:.1f}", ha="center", va="center", color="w" if value < middle else "k")
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right")
    axes.set_yticks(range(len(names)), [f"without {name}" for name in names])
    axes.set_title(f"{document['task']}, {found['label']}: accuracy, per cent")
    figure.colorbar(image, ax=axes)
    return figure


def accuracy_by_round(document: Document) -> Figure:
    """G and P of the model that each round starts from, for each method."""
    panels = [
        _Panel(
            f"{document['task']}: {what}",
            "round",
            "accuracy, per cent",
            {found["label"]: _percent(found["by_round"][name]) for found in document["methods"].values()},
        )
        for name, what in (("G", "held-out domain (G)"), ("P", "own test split (P)"))
    ]
    return _curves(panels)


def conflict_by_round(document: Document) -> Figure:
    """The cosine of the institutions' steps of w_g in each round."""
    known = [found for found in document["methods"].values() if found["conflict"] is not None]
    curves = {found["label"]: found["conflict"]["by_round"] for found in known}
    title, cosine = f"{document['task']}: gradient conflict", "mean cosine of two institutions' steps"
    figure = _curves([_Panel(title, "round", cosine, curves)], least=1)
    figure.axes[0].axhline(0, color="0.7", linewidth=0.8)
    return figure


def scale_curves(document: Document) -> Figure:
    """G and P over the number of clients, for each method."""
    panels = [
        _Panel(
            f"{document['task']}, {document['split']}",
            "clients",
            f"{name}, per cent",
            {label: _percent([row[name]["mean"] for row in rows]) for label, rows in document["methods"].items()},
            document["clients"],
        )
        for name in ("G", "P")
    ]
    return _curves(panels, least=1, marker="o")


def alpha_curves(document: Document) -> Figure:
    """Accuracy over alpha, for each number of clients; of AFL one lambda: that of GCV, or the first."""
    ridges = [variant["ridge"] for variant in document["variants"] if variant["ridge"] is not None]
    shown = [None, "gcv" if "gcv" in ridges else next(iter(ridges), None)]
    places = [float(np.log10(alpha)) for alpha in document["alphas"]]
    panels = []
    for clients in document["clients"]:
        curves = {
            variant["label"]: _percent(
                [cell["accuracy"]["mean"] for cell in variant["cells"] if cell["clients"] == clients]
            )
            for variant in document["variants"]
            if variant["ridge"] in shown
        }
        title = f"{document['task']}, {clients} clients"
        panels.append(_Panel(title, "log10 of alpha", "accuracy, per cent", curves, places))
    return _curves(panels, least=1, marker="o")


def epsilon_curves(document: Document) -> Figure:
    """Accuracy over epsilon for each number of institutions; what it is without noise is the point at the right."""
    epsilons = document["epsilons"]
    # Without noise: a place further on, as far as the last two are from each other.
    places = [float(np.log2(value)) for value in epsilons]
    places = [max(places) + 1.0, *places]
    panels = [
        _Panel(
            f"{document['task']}, {institutions} institutions",
            "log2 of epsilon (the last point: no noise)",
            "accuracy, per cent",
            {
                row["label"]: _percent([cell["accuracy"]["mean"] for cell in row["cells"]])
                for row in document["rows"]
                if row["institutions"] == institutions
            },
            places,
        )
        for institutions in dict.fromkeys(row["institutions"] for row in document["rows"])
    ]
    return _curves(panels, least=1, marker="o")


class _Panel(NamedTuple):
    """Curves by their labels; without `places` they are over 0, 1, 2, ..."""

    title: str
    across: str
    up: str
    curves: Mapping[str, Sequence[float | None]]
    places: Sequence[float] | None = None


def _percent(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else 100 * value for value in values]


def _curves(panels: Sequence[_Panel], least: int = 2, marker: str | None = None) -> Figure:
    """Panels side by side. A curve with a missing value or fewer than `least` has none; its style stays its own."""
    figure = _figure(2.5 + 3.5 * len(panels), 3.4)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for place, (label, values) in enumerate(panel.curves.items()):
            if len(values) >= least and None not in values:
                places = panel.places or range(len(values))
                axes.plot(
                    places,
                    values,
                    LINES[place % 4],
                    marker=marker,
                    markersize=3,
                    label=label,
                    linewidth=1.3,
                    color=f"C{place}",
                )
        axes.set_title(panel.title)
        axes.set_xlabel(panel.across)
        axes.set_ylabel(panel.up)
    _legend(figure)
    return figure


def _legend(figure: Figure) -> None:
    handles, labels = figure.axes[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=7)


def all_plots(document: Document) -> dict[str, Figure]:
    """Every plot by the name of its files."""
    with mpl.rc_context(SETTINGS):
        found = {"accuracy": accuracy_by_round(document), "conflict": conflict_by_round(document)}
        return found | {f"matrix-{method}": heat_map(document, method) for method in document["methods"]}


def write(figure: Figure, folder: Path, name: str, endings: tuple[str, ...] = ENDINGS) -> None:
    """NAME.png and NAME.svg. Raises VeilfedError(FILE_UNUSABLE)."""
    for ending in endings:
        packed = io.BytesIO()
        with mpl.rc_context(SETTINGS):
            figure.savefig(packed, format=ending, dpi=120, metadata={"Date": None} if ending == "svg" else None)
        write_atomic(folder / f"{name}.{ending}", packed.getvalue(), mode=0o644)
