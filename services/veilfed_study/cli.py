"""`veilfed study`: studies in one process. What computes is imported by the commands: it takes a second to load."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
import yaml

from veilfed import packages
from veilfed.cli import output
from veilfed.errors import Code, VeilfedError
from veilfed.files import write_atomic
from veilfed_study import options
from veilfed_study.methods import METHODS, Settings, built_in_settings, named, possible, read_settings

if TYPE_CHECKING:
    from veilfed_study.subjects import Subject

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True, help="Studies in one process, with the trainers and strategies of the services."
)

Task = Annotated[str | None, typer.Option("--task", help="vader, emoji or heart.")]
Data = Annotated[Path | None, typer.Option("--data", help="A folder of images, DOMAIN/CLASS/FILE.")]
Model = Annotated[str | None, typer.Option("--fm", help="The model for --data, such as open_clip:ViT-B-32.")]
SetName = Annotated[
    str | None, typer.Option("--set", help="What --data is: pacs, vlcs, office-home, terra-incognita or femnist.")
]
Institutions = Annotated[int | None, typer.Option(min=1, max=10_000, help="Among how many femnist is divided.")]
PromptsFile = Annotated[Path | None, typer.Option("--prompts", help="Prompts for the classes of --data (YAML).")]
Methods = Annotated[str, typer.Option("--methods", help="Names with commas between them, or all.")]
SettingsFile = Annotated[
    Path | None, typer.Option("--settings", help="Rates and rounds of methods, as `sweep` writes.")
]


@app.command()
def fedot(
    out: options.Out,
    task: Task = None,
    data: Data = None,
    fm: Model = None,
    set_name: SetName = None,
    institutions: Institutions = None,
    prompts: PromptsFile = None,
    methods: Methods = "all",
    seeds: options.Seeds = "50,77,98",
    settings: SettingsFile = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures here.")] = None,
    packages_folder: options.Packages = None,
    cache: options.Cache = None,
) -> None:
    """Leave one domain out: the N x N matrix of each method, G, P and C."""
    from veilfed_study import report as reporting  # noqa: PLC0415

    chosen, asked = options.seeds(seeds), named(methods)
    subject = _subject(task, data, fm, set_name, institutions, prompts, packages_folder, cache)
    wanted = possible(asked, subject.text_tower)
    where = packages_folder or packages.default_folder()
    with _training(len(wanted) * len(chosen) * len(subject.domains)) as told:
        document = reporting.study(subject, wanted, chosen, _settings(settings, task), out, where, told)
    reporting.keep(document, out)
    if json_file is not None:
        reporting.write_document(json_file, document)
    _print(document)


@app.command()
def sweep(
    out: options.Out,
    task: Task = None,
    data: Data = None,
    fm: Model = None,
    set_name: SetName = None,
    institutions: Institutions = None,
    prompts: PromptsFile = None,
    methods: Methods = "all",
    seeds: options.Seeds = "50",
    folds: Annotated[int, typer.Option(help="Parts that a training split is cut into.")] = 4,
    used: Annotated[int, typer.Option(help="How many of them are evaluated on.")] = 1,
    classifier_rates: Annotated[str, typer.Option(help="Rates of w_g.")] = "0.002,0.005",
    other_rates: Annotated[str, typer.Option(help="Rates of whatever else is trained.")] = "0.0005,0.001",
    blocks: Annotated[str, typer.Option(help="Values of r for FEDOT(+B) and its relatives.")] = "12,24",
    rounds: Annotated[str, typer.Option(help="Numbers of rounds.")] = "5,10,20",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the whole grid here.")] = None,
    packages_folder: options.Packages = None,
    cache: options.Cache = None,
) -> None:
    """Chooses rates, r and rounds on a validation part of the training splits; writes OUT/settings.yaml."""
    from veilfed_study import report as reporting  # noqa: PLC0415
    from veilfed_study import sweep as sweeping  # noqa: PLC0415
    from veilfed_study.store import Store  # noqa: PLC0415

    chosen = options.seeds(seeds)
    grid = sweeping.Grid(
        options.numbers(classifier_rates, float, "--classifier-rates"),
        options.numbers(other_rates, float, "--other-rates"),
        options.numbers(blocks, int, "--blocks"),
        sorted(options.counts(rounds, "--rounds")),
    )
    asked = named(methods)
    subject = _subject(task, data, fm, set_name, institutions, prompts, packages_folder, cache)
    wanted = [name for name in possible(asked, subject.text_tower) if METHODS[name].rates]
    with _training(len(chosen) * sum(len(list(grid.of(method))) for method in wanted)) as told:
        document = sweeping.sweep(subject, wanted, chosen, grid, folds, used, Store(out / "sweep"), told)
    reporting.write_document(json_file or out / "sweep.json", document)
    settings = yaml.safe_dump(sweeping.settings_of(document), sort_keys=False)
    write_atomic(out / "settings.yaml", settings.encode(), mode=0o644)
    output.result(None, f"{out / 'settings.yaml'}: {len(wanted)} methods")


@app.command()
def scale(
    out: options.Out,
    task: Task = None,
    data: Data = None,
    fm: Model = None,
    set_name: SetName = None,
    institutions: Institutions = None,
    prompts: PromptsFile = None,
    methods: Methods = "averaging,fedot-b",
    seeds: options.Seeds = "50,77,98",
    clients: Annotated[str, typer.Option(help="Numbers of clients.")] = "1,5,15,35,75",
    split: Annotated[str, typer.Option(help="How samples are divided: by-domain or dirichlet.")] = "by-domain",
    alpha: Annotated[float, typer.Option(help="Of Dirichlet: small for clients with few classes.")] = 0.5,
    settings: SettingsFile = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures here.")] = None,
    packages_folder: options.Packages = None,
    cache: options.Cache = None,
) -> None:
    """Divides all domains but one among many clients: G and P over their number."""
    from veilfed_study import plots, tables  # noqa: PLC0415
    from veilfed_study import report as reporting  # noqa: PLC0415
    from veilfed_study import scale as scaling  # noqa: PLC0415
    from veilfed_study.store import Store  # noqa: PLC0415

    chosen, counts = options.seeds(seeds), sorted(options.numbers(clients, int, "--clients"))
    if split not in {"by-domain", "dirichlet"}:
        raise VeilfedError(Code.INPUT_INVALID, "--split is by-domain or dirichlet")
    division = scaling.Division("by-domain" if split == "by-domain" else "dirichlet", alpha)
    asked = named(methods)
    subject = _subject(task, data, fm, set_name, institutions, prompts, packages_folder, cache)
    wanted = possible(asked, subject.text_tower)
    with _training(len(wanted) * len(chosen) * len(subject.domains) * len(counts)) as told:
        document = scaling.scale(
            subject, wanted, chosen, counts, division, _settings(settings, task), Store(out / "scale"), told
        )
    reporting.write_document(json_file or out / f"scale-{split}.json", document)
    plots.write(plots.scale_curves(document), out, f"scale-{split}")
    table = tables.clients(document)
    output.result(None, output.table(table.columns, table.rows, table.title))


@app.command()
def report(
    out: options.Out,
    page: Annotated[Path, typer.Option(help="The page to write; its plots go to the folder `figures` beside it.")],
    seeds: options.Seeds = "50,77,98",
    scale_seeds: Annotated[
        str, typer.Option(help="Seeds of the study of many clients, which takes longest; none: it is left out.")
    ] = "50",
    packages_folder: options.Packages = None,
    cache: options.Cache = None,
) -> None:
    """All tasks, all methods, many clients: writes the page of results."""
    from veilfed_study import report as reporting  # noqa: PLC0415

    chosen, others = options.seeds(seeds), [] if scale_seeds == "none" else options.seeds(scale_seeds)
    _one_thread()
    where = packages_folder or packages.default_folder()
    with _training(None) as told:
        documents = reporting.report(chosen, others, out, page, where, cache or _cache(where), told)
    for document in documents:
        _print(document)


def _print(document: dict[str, Any]) -> None:
    from veilfed_study import tables  # noqa: PLC0415

    table = tables.figures(document)
    output.result(None, output.table(table.columns, table.rows, table.title))


@contextmanager
def _training(total: int | None) -> Iterator[Callable[[str], None]]:
    """A bar that moves when it is told what was finished."""
    with output.progress() as bars:
        bar = bars.add_task("training", total=total)
        yield lambda what: bars.update(bar, description=what, advance=1)


def _one_thread() -> None:
    """As the agents have: sums in another order give other bytes."""
    import torch  # noqa: PLC0415

    torch.set_num_threads(1)


def _settings(path: Path | None, task: str | None) -> Settings:
    if path is not None:
        return read_settings(path)
    return built_in_settings(task) if task else Settings()


def _subject(
    task: str | None,
    data: Path | None,
    fm: str | None,
    set_name: str | None,
    institutions: int | None,
    prompts: Path | None,
    packages_folder: Path | None,
    cache: Path | None,
) -> "Subject":
    if (task is None) == (data is None):
        raise VeilfedError(Code.INPUT_INVALID, "say what to study: --task NAME, or --data FOLDER --fm MODEL")
    if data is not None and fm is None:
        raise VeilfedError(Code.INPUT_INVALID, "--data needs --fm, the model that embeds it")
    from client_agent.class_vectors import read_prompts  # noqa: PLC0415
    from veilfed_study import subjects  # noqa: PLC0415

    _one_thread()
    where = packages_folder or packages.default_folder()
    kept = cache or _cache(where)
    with _embedding() as progress:
        if task is not None:
            return subjects.of_task(task, where, kept, progress)
        return subjects.of_folder(
            cast(Path, data),
            cast(str, fm),
            where,
            kept,
            set_name=set_name,
            institutions=institutions,
            prompts=read_prompts(prompts) if prompts else None,
            progress=progress,
        )


def _cache(where: Path) -> Path:
    return where.parent / "embeddings"


@contextmanager
def _embedding() -> Iterator[Any]:
    with output.progress() as bars:
        bar = bars.add_task("loading", total=1)
        yield lambda what, done, total: bars.update(bar, description=what, completed=done, total=total)
