"""`veilfed study analytic-report`: the studies of one shot against many rounds, and their page."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path

from veilfed.files import write_atomic
from veilfed_study import analytic, plots, shot_page, shot_tables, subjects
from veilfed_study.methods import built_in_settings, with_rounds
from veilfed_study.report import SEEDS, Document, Told, made, write_document
from veilfed_study.store import Store
from veilfed_study.tables import Table
from veilfed_study.variants import Grid, Ridge, Tuning

__all__ = ["TASKS", "Asked", "keep", "report"]

# How many training rows the studies with FedOPAL have of each task: a pass of the model for each takes its time.
TASKS = {"vader": 1000, "emoji": 320}
ROUNDS = 20
RIDGES: tuple[Ridge, ...] = (0.01, 1.0, 10.0, 100.0, "gcv")
TRAINED = ("averaging", "fedot-b")
WHOLE = Grid([10, 100], [0.01, 0.1, 0.5, 1.0, 10.0], RIDGES, [1, 5])
BESIDE = Grid([5], [0.1, 1.0], RIDGES, [1])
SWEEP = Grid([5], [0.1], RIDGES, [1], [Tuning(), Tuning(0.0), Tuning(float("inf")), Tuning(0.1, 3)])


@dataclass(frozen=True)
class Asked:
    """What the page is to have. `rows` are the training rows of the studies with FedOPAL; None: those of `TASKS`."""

    tasks: Sequence[str]
    seeds: Sequence[int]
    rows: int | None = None

    @property
    def command(self) -> str:
        """As it is given to get such a page."""
        tasks, seeds = ",".join(self.tasks), ",".join(map(str, self.seeds))
        rows = "" if self.rows is None else f"--rows {self.rows} "
        return (
            f"OMP_NUM_THREADS=1 veilfed study analytic-report --tasks {tasks} --seeds {seeds} {rows}"
            "--out results --page results-analytic.md"
        )

    @property
    def whole(self) -> bool:
        """Whether these are the figures that the conclusions by hand (`why-analytic.md`) are about."""
        return tuple(self.tasks) == tuple(TASKS) and tuple(self.seeds) == SEEDS and self.rows is None


def keep(document: Document, out: Path) -> list[Table]:
    """OUT/analytic.json, OUT/tables/analytic-CLIENTS-FIGURE.md and .tex, OUT/plots/analytic.png and .svg.

    The tables of `accuracy` come back.
    """
    write_document(out / "analytic.json", document)
    folder = made(out / "tables")
    plots.write(plots.alpha_curves(document), made(out / "plots"), "analytic")
    found = []
    for clients in document["clients"]:
        for figure in ("accuracy", "own"):
            table = shot_tables.accuracies(document, clients, figure)
            for ending, text in (("md", table.markdown()), ("tex", table.latex())):
                write_atomic(folder / f"analytic-{clients}-{figure}.{ending}", text.encode(), mode=0o644)
        found.append(shot_tables.accuracies(document, clients, "accuracy"))
    return found


def report(asked: Asked, out: Path, target: Path, packages: Path, cache: Path, told: Told) -> None:
    """Runs what is not finished in `out`, writes the page `target` and its plots to the folder `figures` beside it."""
    found = []
    figures = made(target.parent / "figures")
    for task in asked.tasks:
        subject = subjects.of_task(task, packages, cache)
        settings = with_rounds(built_in_settings(task), TRAINED, ROUNDS)
        folder = made(out / subject.folder)
        run = partial(analytic.study, subject, seeds=asked.seeds, settings=settings, store=Store(folder / "analytic"))
        rows = asked.rows or TASKS[task]

        def ended(what: str, task: str = task) -> None:
            told(f"{task} {what}")

        one = shot_page.Found(
            run(["afl", "fedcgs", *TRAINED], grid=WHOLE, ended=ended),
            run(["afl", "fedcgs", "fedopal", *TRAINED], grid=BESIDE, ended=ended, rows=rows),
            run(["afl", "fedopal"], grid=SWEEP, ended=ended, rows=rows),
        )
        keep(dict(one.whole), folder)
        for name, document in (("beside", one.beside), ("sweep", one.sweep)):
            write_document(folder / f"analytic-{name}.json", dict(document))
        plots.write(plots.alpha_curves(one.whole), figures, f"analytic-{task}", ("svg",))
        found.append(one)
    why = files("veilfed_study").joinpath("why-analytic.md").read_text(encoding="utf-8") if asked.whole else ""
    write_atomic(target, shot_page.page(found, asked.command, why).encode(), mode=0o644)
