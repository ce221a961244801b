"""`veilfed study report`: every study of the page of results, and the page."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from veilfed.demo.tasks import TASKS
from veilfed.errors import Code, VeilfedError
from veilfed.files import write_atomic
from veilfed_study import page, plots, runner, scale, subjects, summary, tables, tabular
from veilfed_study.methods import METHODS, Settings, built_in_settings, possible
from veilfed_study.store import Store

__all__ = ["SEEDS", "Asked", "Document", "Told", "keep", "made", "report", "study", "tasks", "write_document"]

Document = dict[str, Any]
Told = Callable[[str], None]

# Heart's 75 clients would have some six patients each to train on.
SCALE_TASKS = ("vader", "emoji")
SCALE_METHODS = ("averaging", "all-local", "fedot-b")
SCALE_COUNTS = (1, 5, 15, 35, 75)
SEEDS = (50, 77, 98)
SCALE_SEEDS = (50, 77)
SCALE_ROUNDS = 20  # a client's pass over its few samples is one step or two
SPLITS = (scale.Division("by-domain"), scale.Division("dirichlet"))


@dataclass(frozen=True)
class Asked:
    """What the page is to have; without `scale_seeds`, the study of many clients is left out."""

    tasks: Sequence[str]
    seeds: Sequence[int]
    scale_seeds: Sequence[int]

    @property
    def command(self) -> str:
        """As it is given to get such a page."""
        seeds, scale_seeds = (",".join(map(str, some)) for some in (self.seeds, self.scale_seeds))
        return (
            f"veilfed study report --tasks {','.join(self.tasks)} --seeds {seeds} "
            f"--scale-seeds {scale_seeds or 'none'} --out results --page results-fedot.md"
        )

    @property
    def whole(self) -> bool:
        """Whether these are the figures that the conclusions by hand (`why.md`) are about."""
        return len(self.tasks) == len(TASKS) and (tuple(self.seeds), tuple(self.scale_seeds)) == (SEEDS, SCALE_SEEDS)


def tasks(names: str) -> list[str]:
    """The tasks of a list such as "vader,heart". Raises VeilfedError(INPUT_INVALID) for an unknown one."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if not wanted or (unknown := [name for name in wanted if name not in TASKS]):
        which = f"there is no task {unknown[0]!r}" if wanted else "no task is named"
        raise VeilfedError(Code.INPUT_INVALID, which, f"Tasks: {', '.join(TASKS)}.")
    return [name for name in TASKS if name in wanted]


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
    if subject.task == "heart":
        splits = dict.fromkeys(settings.split_of(seed) for seed in seeds)
        document["beside"] = tabular.baselines(subject, list(splits), packages)
    return document


def keep(document: Document, out: Path) -> None:
    """OUT/study.json, OUT/tables/NAME.md and .tex, OUT/plots/NAME.png and .svg."""
    write_document(out / "study.json", document)
    folders = made(out / "tables"), made(out / "plots")
    for name, table in tables.all_tables(document).items():
        for ending, text in (("md", table.markdown()), ("tex", table.latex())):
            write_atomic(folders[0] / f"{name}.{ending}", text.encode(), mode=0o644)
    for name, figure in plots.all_plots(document).items():
        plots.write(figure, folders[1], name)


def report(asked: Asked, out: Path, target: Path, packages: Path, cache: Path, told: Told) -> list[Document]:
    """Runs what is not finished in `out`, writes the page `target` and its plots to the folder `figures` beside it."""
    studies, scales = [], []
    for task in asked.tasks:
        subject = subjects.of_task(task, packages, cache)
        settings = built_in_settings(task)
        methods = possible(list(METHODS), subject.text_tower)
        folder = made(out / subject.folder)
        document = study(subject, methods, asked.seeds, settings, folder, packages, told)
        keep(document, folder)
        studies.append(document)
        if task in SCALE_TASKS and asked.scale_seeds:
            scales += [_scale(subject, asked.scale_seeds, settings, division, folder, told) for division in SPLITS]
    _write_page(studies, scales, asked, target)
    return studies


def _scale(
    subject: subjects.Subject,
    seeds: Sequence[int],
    settings: Settings,
    division: scale.Division,
    out: Path,
    told: Told,
) -> Document:
    chosen = {name: settings.of(name).model_copy(update={"rounds": SCALE_ROUNDS}) for name in SCALE_METHODS}
    document = scale.scale(
        subject,
        SCALE_METHODS,
        seeds,
        SCALE_COUNTS,
        division,
        settings.model_copy(update={"methods": chosen}),
        Store(out / "scale"),
        lambda method: told(f"{subject.name} {division.split} {method}"),
    )
    write_document(out / f"scale-{division.split}.json", document)
    return document


def _write_page(studies: Sequence[Document], scales: Sequence[Document], asked: Asked, target: Path) -> None:
    figures = made(target.parent / "figures")
    for document in studies:
        drawn = plots.all_plots(document)
        for name in page.PLOTS:
            plots.write(drawn[name], figures, f"{document['task']}-{name}", ("svg",))
    for document in scales:
        plots.write(plots.scale_curves(document), figures, page.scale_name(document), ("svg",))
    why = files("veilfed_study").joinpath("why.md").read_text(encoding="utf-8") if asked.whole else ""
    text = page.page(studies, scales, asked.command, why)
    write_atomic(target, text.encode(), mode=0o644)


def made(folder: Path) -> Path:
    """The folder, which is there now. Raises VeilfedError(FILE_UNUSABLE)."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise VeilfedError(Code.FILE_UNUSABLE, f"{folder}: {error.strerror}") from None
    return folder
