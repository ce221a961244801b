"""The plots of a study as PNG and SVG: equal figures give equal files. Needs the extra `study` (matplotlib)."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from veilfed.files import write_atomic

__all__ = ["accuracy_by_round", "all_plots", "conflict_by_round", "heat_map", "scale_curves", "write"]

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
    figure = _figure(9, 3.6)
    for axes, name, what in zip(
        figure.subplots(1, 2), ("G", "P"), ("held-out domain (G)", "own test split (P)"), strict=True
    ):
        for place, found in enumerate(document["methods"].values()):
            values = found["by_round"][name]
            if len(values) > 1 and values[0] is not None:
                axes.plot([100 * value for value in values], LINES[place % 4], label=found["label"], linewidth=1.3)
        axes.set_xlabel("round")
        axes.set_ylabel("accuracy, per cent")
        axes.set_title(f"{document['task']}: {what}")
    _legend(figure)
    return figure


def conflict_by_round(document: Document) -> Figure:
    """The cosine of the institutions' steps of w_g in each round."""
    figure = _figure(6.5, 3.2)
    axes = figure.subplots()
    for place, found in enumerate(document["methods"].values()):
        if found["conflict"] is not None:
            axes.plot(found["conflict"]["by_round"], LINES[place % 4], label=found["label"], linewidth=1.3)
    axes.axhline(0, color="0.7", linewidth=0.8)
    axes.set_xlabel("round")
    axes.set_ylabel("mean cosine of two institutions' steps")
    axes.set_title(f"{document['task']}: gradient conflict")
    _legend(figure)
    return figure


def scale_curves(document: Document) -> Figure:
    """G and P over the number of clients, for each method."""
    figure = _figure(9, 3.2)
    for axes, name in zip(figure.subplots(1, 2), ("G", "P"), strict=True):
        for place, (label, rows) in enumerate(document["methods"].items()):
            values = [100 * row[name]["mean"] for row in rows]
            axes.plot(document["clients"], values, LINES[place % 4], marker="o", markersize=3, label=label)
        axes.set_xlabel("clients")
        axes.set_ylabel(f"{name}, per cent")
        axes.set_title(f"{document['task']}, {document['split']}")
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
