"""`veilfed study report`: every study of the page of results, and the page."""

import json
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from veilfed.demo.tasks import TASKS
from veilfed.errors import Code, VeilfedError
from veilfed.files import write_atomic
from veilfed_study import page, plots, runner, scale, subjects, summary, tables, tabular
from veilfed_study.methods import Settings, built_in_settings, named, possible
from veilfed_study.store import Store

__all__ = ["keep", "report", "study", "write_document"]

Document = dict[str, Any]
Told = Callable[[str], None]

SCALE_TASK = "vader"
SCALE_METHODS = ("averaging", "fedot-b")
SCALE_COUNTS = (1, 5, 15, 35, 75)
SCALE_ROUNDS = 20  # a client's pass over its few samples is one step or two
SPLITS = (scale.Division("by-domain"), scale.Division("dirichlet"))


def write_document(path: Path, document: Document) -> None:
    """Raises VeilfedError(FILE_UNUSABLE)."""
    write_atomic(path, (json.dumps(document, indent=1) + "\n").encode(), mode=0o644)


def study(
    subject: subjects.Subject,
    methods: Sequence[str],
    seeds: Sequence[int],
    settings: Settings,
    out: Path,
    packages: Path,
    told: Told,
) -> Document:
    """A study with everything that is shown beside its methods."""
    results = runner.run(
        subject,
        methods,
        seeds,
        settings,
        Store(out / "cells"),
        lambda cell, kept: told(f"{subject.name} {cell.method}"),
    )
    document = summary.document(subject, methods, seeds, settings, results)
    if subject.name == "heart":
        document["beside"] = tabular.baselines(subject, seeds, packages)
    return document


def keep(document: Document, out: Path) -> None:
    """OUT/study.json, OUT/tables/NAME.md and .tex, OUT/plots/NAME.png and .svg."""
    write_document(out / "study.json", document)
    folders = _made(out / "tables"), _made(out / "plots")
    for name, table in tables.all_tables(document).items():
        for ending, text in (("md", table.markdown()), ("tex", table.latex())):
            write_atomic(folders[0] / f"{name}.{ending}", text.encode(), mode=0o644)
    for name, figure in plots.all_plots(document).items():
        plots.write(figure, folders[1], name)


def report(
    seeds: Sequence[int], scale_seeds: Sequence[int], out: Path, target: Path, packages: Path, cache: Path, told: Told
) -> list[Document]:
    """Runs what is not finished in `out`, writes the page `target` and its plots to the folder `figures` beside it.

    Without seeds for it, the study of many clients, which takes longest, is left out.
    """
    studies, scales = [], []
    for task in TASKS:
        subject = subjects.of_task(task, packages, cache)
        settings = built_in_settings(task)
        methods = possible(named("all"), subject.text_tower)
        document = study(subject, methods, seeds, settings, _made(out / task), packages, told)
        keep(document, out / task)
        studies.append(document)
        if task == SCALE_TASK and scale_seeds:
            scales = [_scale(subject, scale_seeds, settings, division, out / task, told) for division in SPLITS]
    _write_page(studies, scales, target)
    return studies


def _scale(
    subject: subjects.Subject,
    seeds: Sequence[int],
    settings: Settings,
    division: scale.Division,
    out: Path,
    told: Told,
) -> Document:
    longer = Settings(
        methods={name: settings.of(name).model_copy(update={"rounds": SCALE_ROUNDS}) for name in SCALE_METHODS}
    )
    document = scale.scale(
        subject,
        SCALE_METHODS,
        seeds,
        SCALE_COUNTS,
        division,
        longer,
        Store(out / "scale"),
        lambda method: told(f"{subject.name} {division.split} {method}"),
    )
    write_document(out / f"scale-{division.split}.json", document)
    return document


def _write_page(studies: Sequence[Document], scales: Sequence[Document], target: Path) -> None:
    figures = _made(target.parent / "figures")
    for document in studies:
        drawn = plots.all_plots(document)
        for name in page.PLOTS:
            plots.write(drawn[name], figures, f"{document['task']}-{name}", ("svg",))
    for document in scales:
        plots.write(plots.scale_curves(document), figures, page.scale_name(document), ("svg",))
    why = files("veilfed_study").joinpath("why.md").read_text(encoding="utf-8")
    command = "veilfed study report" + ("" if scales else " --scale-seeds none")
    text = page.page(studies, scales, command, why)
    write_atomic(target, text.encode(), mode=0o644)


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise VeilfedError(Code.FILE_UNUSABLE, f"{folder}: {error.strerror}") from None
    return folder
