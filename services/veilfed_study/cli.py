"""`veilfed study`: studies in one process. What computes is imported by the commands: it takes a second to load."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from veilfed import packages
from veilfed.cli import output
from veilfed.cli.groups import taking
from veilfed.errors import Code, VeilfedError
from veilfed.files import write_atomic
from veilfed_study import options
from veilfed_study.methods import METHODS, Settings, built_in_settings, named, possible, read_settings, with_rounds

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True, help="Studies in one process, with the trainers and strategies of the services."
)

Methods = Annotated[str, typer.Option("--methods", help="Names with commas between them, or all.")]
SettingsFile = Annotated[
    Path | None, typer.Option("--settings", help="Rates and rounds of methods, as `sweep` writes.")
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write all figures here.")]


@app.command()
@taking(options.choice)
def fedot(
    choice: options.Choice,
    out: options.Out,
    methods: Methods = "all",
    seeds: options.Seeds = "50,77,98",
    settings: SettingsFile = None,
    json_file: JsonFile = None,
) -> None:
    """Leave one domain out: the N x N matrix of each method, G, P and C."""
    from veilfed_study import report as reporting  # noqa: PLC0415

    chosen, asked, used = options.seeds(seeds), named(methods), _settings(settings, choice.task)
    subject = choice.subject()
    wanted, folder = possible(asked, subject.text_tower), out / subject.folder
    with _training(len(wanted) * len(chosen) * len(subject.domains)) as told:
        document = reporting.study(subject, wanted, chosen, used, folder, choice.packages, told)
    reporting.keep(document, folder)
    if json_file is not None:
        reporting.write_document(json_file, document)
    _print(document)


@app.command()
@taking(options.choice)
def sweep(
    choice: options.Choice,
    out: options.Out,
    methods: Methods = "all",
    seeds: Annotated[str, typer.Option("--seeds", help="Of first values and batches.")] = "50",
    split: Annotated[
        int, typer.Option(min=0, max=2**31 - 1, help="Seed of the split whose training rows are used.")
    ] = 50,
    folds: Annotated[int, typer.Option(help="Parts that the training rows are cut into.")] = 3,
    used: Annotated[int | None, typer.Option(help="How many of them are evaluated on; all by default.")] = None,
    classifier_rates: Annotated[str, typer.Option(help="Rates of w_g.")] = "0.002,0.005,0.01",
    other_rates: Annotated[str, typer.Option(help="Rates of whatever else is trained.")] = "0.0001,0.0005,0.002",
    blocks: Annotated[str, typer.Option(help="Values of r for FEDOT(+B) and its relatives.")] = "24",
    rounds: Annotated[str, typer.Option(help="Numbers of rounds.")] = "3,6,12,20",
    json_file: JsonFile = None,
) -> None:
    """Chooses rates, r and rounds on a validation part of the training rows; writes settings.yaml."""
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
    validation = sweeping.Validation(split, folds, folds if used is None else used)
    asked = named(methods)
    subject = choice.subject()
    wanted = [name for name in possible(asked, subject.text_tower) if METHODS[name].rates]
    if not wanted:
        raise VeilfedError(Code.INPUT_INVALID, f"{asked[0]} has nothing to choose")
    folder = out / subject.folder
    with _training(len(chosen) * sum(len(list(grid.of(method))) for method in wanted)) as told:
        document = sweeping.sweep(subject, wanted, chosen, grid, validation, Store(folder / "sweep"), told)
    reporting.write_document(json_file or folder / "sweep.json", document)
    settings = yaml.safe_dump(sweeping.settings_of(document), sort_keys=False)
    write_atomic(folder / "settings.yaml", settings.encode(), mode=0o644)
    output.result(None, f"{folder / 'settings.yaml'}: {len(wanted)} methods")


@app.command()
@taking(options.choice)
def scale(
    choice: options.Choice,
    out: options.Out,
    methods: Methods = "averaging,fedot-b",
    seeds: options.Seeds = "50,77,98",
    clients: Annotated[str, typer.Option(help="Numbers of clients.")] = "1,5,15,35,75",
    split: Annotated[str, typer.Option(help="How samples are divided: by-domain or dirichlet.")] = "by-domain",
    alpha: Annotated[float, typer.Option(help="Of Dirichlet: small for clients with few classes.")] = 0.5,
    settings: SettingsFile = None,
    json_file: JsonFile = None,
) -> None:
    """Divides all domains but one among many clients: G and P over their number."""
    from veilfed_study import plots, tables  # noqa: PLC0415
    from veilfed_study import report as reporting  # noqa: PLC0415
    from veilfed_study import scale as scaling  # noqa: PLC0415
    from veilfed_study.store import Store  # noqa: PLC0415

    chosen, sizes = options.seeds(seeds), sorted(options.counts(clients, "--clients"))
    division = scaling.Division.named(split, alpha)
    asked, used = named(methods), _settings(settings, choice.task)
    subject = choice.subject()
    wanted, folder = possible(asked, subject.text_tower), out / subject.folder
    with _training(len(wanted) * len(chosen) * len(subject.domains) * len(sizes)) as told:
        document = scaling.scale(subject, wanted, chosen, sizes, division, used, Store(folder / "scale"), told)
    reporting.write_document(json_file or folder / f"scale-{split}.json", document)
    plots.write(plots.scale_curves(document), folder, f"scale-{split}")
    table = tables.clients(document)
    output.result(None, output.table(table.columns, table.rows, table.title))


@app.command()
@taking(options.choice)
def analytic(
    choice: options.Choice,
    out: options.Out,
    methods: Annotated[
        str, typer.Option("--methods", help="afl, fedcgs, fedopal, and methods of `fedot` without class vectors.")
    ] = "afl,fedcgs,averaging,fedot-b",
    seeds: options.Seeds = "50,77,98",
    clients: Annotated[str, typer.Option(help="Numbers of clients.")] = "10,100",
    alphas: Annotated[
        str, typer.Option(help="Of Dirichlet: small for clients with few classes.")
    ] = "0.01,0.1,0.5,1,10",
    ridges: Annotated[
        str, typer.Option(help="Values of lambda of afl and fedopal; gcv chooses one.")
    ] = "0.01,0.1,1,10,100,gcv",
    least: Annotated[
        str, typer.Option(help="Of afl, fedcgs and fedopal: clients leave out classes with fewer samples.")
    ] = "1,5",
    tunings: Annotated[str, typer.Option(help="Of fedopal: pairs MU:EPOCHS.")] = "0.1:1",
    rounds: Annotated[int, typer.Option(min=1, help="Of the methods that are trained.")] = 50,
    rows: Annotated[
        int | None, typer.Option(min=1, help="So many training rows, and test rows in proportion; all by default.")
    ] = None,
    settings: SettingsFile = None,
    json_file: JsonFile = None,
) -> None:
    """One shot against many rounds: closed forms and trained methods on the same skewed clients."""
    from veilfed_study import analytic as study  # noqa: PLC0415
    from veilfed_study import report as reporting  # noqa: PLC0415
    from veilfed_study import shot_report, variants  # noqa: PLC0415
    from veilfed_study.store import Store  # noqa: PLC0415

    chosen, asked = options.seeds(seeds), variants.methods_of(methods)
    grid = variants.Grid(
        sorted(options.counts(clients, "--clients")),
        sorted(options.numbers(alphas, float, "--alphas")),
        variants.ridges_of(ridges),
        sorted(options.counts(least, "--least")),
        variants.tunings_of(tunings),
    )
    used = with_rounds(_settings(settings, choice.task), asked, rounds)
    subject = choice.subject(domains=False)
    folder = out / subject.folder
    total = len(variants.variants(asked, grid)) * len(chosen) * len(grid.clients) * len(grid.alphas)
    with _training(total) as told:
        document = study.study(subject, asked, chosen, grid, used, Store(folder / "analytic"), told, rows)
    found = shot_report.keep(document, folder)
    if json_file is not None:
        reporting.write_document(json_file, document)
    for table in found:
        output.result(None, output.table(table.columns, table.rows, table.title))


@app.command()
def report(
    out: options.Out,
    page: Annotated[Path, typer.Option(help="The page to write; its plots go to the folder `figures` beside it.")],
    tasks: Annotated[str, typer.Option(help="Names with commas between them.")] = "vader,emoji,heart",
    seeds: options.Seeds = "50,77,98",
    scale_seeds: Annotated[
        str, typer.Option(help="Seeds of the study of many clients; none: it is left out.")
    ] = "50,77",
    packages_folder: options.Packages = None,
    cache: options.Cache = None,
) -> None:
    """All tasks, all methods, many clients: writes the page of results."""
    from veilfed_study import report as reporting  # noqa: PLC0415

    others = [] if scale_seeds == "none" else options.seeds(scale_seeds, "--scale-seeds")
    asked = reporting.Asked(reporting.tasks(tasks), options.seeds(seeds), others)
    options.one_thread()
    where = packages_folder or packages.default_folder()
    with _training(None) as told:
        documents = reporting.report(asked, out, page, where, cache or where.parent / "embeddings", told)
    for document in documents:
        _print(document)


@app.command()
def analytic_report(
    out: options.Out,
    page: Annotated[Path, typer.Option(help="The page to write; its plots go to the folder `figures` beside it.")],
    tasks: Annotated[str, typer.Option(help="Names with commas between them: vader, emoji.")] = "vader,emoji",
    seeds: options.Seeds = "50,77,98",
    rows: Annotated[
        int | None, typer.Option(min=1, help="Training rows of the studies with fedopal; each task has its own.")
    ] = None,
    packages_folder: options.Packages = None,
    cache: options.Cache = None,
) -> None:
    """One shot against many rounds on these tasks, FedOPAL among the methods: writes the page of results."""
    from veilfed_study import report as reporting  # noqa: PLC0415
    from veilfed_study import shot_report  # noqa: PLC0415

    wanted = reporting.tasks(tasks)
    if other := [name for name in wanted if name not in shot_report.TASKS]:
        raise VeilfedError(Code.INPUT_INVALID, f"{other[0]} is no task of this page", "Tasks: vader, emoji.")
    asked = shot_report.Asked(wanted, options.seeds(seeds), rows)
    options.one_thread()
    where = packages_folder or packages.default_folder()
    with _training(None) as told:
        shot_report.report(asked, out, page, where, cache or where.parent / "embeddings", told)
    output.result(None, f"{page}: {', '.join(wanted)}")


@app.command()
@taking(options.choice)
def privacy(
    choice: options.Choice,
    out: options.Out,
    mechanisms: Annotated[str, typer.Option(help="Names with commas between them, or all.")] = "all",
    seeds: options.Seeds = "50,77,98",
    sizes: Annotated[str, typer.Option(help="Numbers of institutions.")] = "4,40",
    epsilons: Annotated[str, typer.Option(help="Values of epsilon.")] = "0.5,1,2,4,8,16",
    page: Annotated[Path | None, typer.Option(help="Write the page of results here, its plot to `figures`.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Accuracy against epsilon of the methods that a job can have with privacy."""
    from veilfed_study import privacy as study  # noqa: PLC0415
    from veilfed_study import privacy_page  # noqa: PLC0415
    from veilfed_study import report as reporting  # noqa: PLC0415
    from veilfed_study.store import Store  # noqa: PLC0415

    asked, chosen = study.named(mechanisms), options.seeds(seeds)
    counts = sorted(options.counts(sizes, "--sizes"))
    targets = study.targets(options.numbers(epsilons, float, "--epsilons"))
    subject = choice.subject()
    folder = out / subject.folder
    with _training(len(asked) * len(chosen) * len(counts) * (len(targets) + 1)) as told:
        document = study.study(subject, asked, chosen, counts, targets, Store(folder / "privacy"), told)
    reporting.write_document(json_file or folder / "privacy.json", document)
    for table in privacy_page.keep(document, folder):
        output.result(None, output.table(table.columns, table.rows, table.title))
    if page is not None:
        command = f"veilfed study privacy --task {subject.name} --out results --page {page.name}"
        privacy_page.write_page(document, page, command)


@app.command("blind-check")
def blind_check(
    student: Annotated[Path, typer.Option(help="What `veilfed oracle distill` has written.")],
    job: Annotated[Path, typer.Option(help="The specification of the job, JSON.")],
    agent: Annotated[list[str], typer.Option(help="INSTITUTION=FILE: an agent's configuration; once for each.")],
    as_json: output.Json = False,
) -> None:
    """Compares a job on encrypted blocks with the same job in the clear, from the agents' own files."""
    from fm_oracle.distill.package import StudentPackage  # noqa: PLC0415
    from fm_oracle.models import registry  # noqa: PLC0415
    from veilfed_study.blind_check import compared  # noqa: PLC0415

    pairs = [one.partition("=") for one in agent]
    teacher = registry.load(StudentPackage.load(student).shape.kind, packages.default_folder())
    found = compared(student, job, {name: Path(path) for name, _, path in pairs}, teacher)
    output.result(found, output.table(("figure", "value"), found.items()), as_json)


@app.command()
def blind(
    student: Annotated[
        list[str], typer.Option("--student", help="LABEL=FILE, as `veilfed oracle distill` writes it; may be repeated.")
    ],
    data: Annotated[Path, typer.Option(help="Examples that no student was distilled on: a CSV file, or images.")],
    out: options.Out,
    seeds: options.Seeds = "50,77,98",
    clients: Annotated[str, typer.Option(help="Numbers of clients.")] = "10,20,50",
    alphas: Annotated[
        str, typer.Option(help="Of Dirichlet, with the first number of clients; the other numbers have the first.")
    ] = "1,100,0.01",
    ranks: Annotated[str, typer.Option(help="Of adapters; all but the first are run centralised alone.")] = "16,4,64",
    rounds: Annotated[int, typer.Option(min=1, max=1000)] = 50,
    rate: Annotated[float, typer.Option(min=1e-6, max=10, help="SGD's.")] = 0.1,
    alpha: Annotated[float, typer.Option("--adapter-alpha", min=1e-6, max=1000, help="Scale of adapters.")] = 0.3,
    epochs: Annotated[int, typer.Option(min=1, max=1000, help="Of a round.")] = 1,
    rows: Annotated[int, typer.Option(min=10, help="So many examples, drawn at random.")] = 1000,
    page: Annotated[Path | None, typer.Option(help="Write the page of results here.")] = None,
    packages_folder: options.Packages = None,
    json_file: JsonFile = None,
) -> None:
    """BlindFed's adapters on block outputs of students, in the clear: divisions, sampling of blocks, ranks, probes."""
    from veilfed_study import blind as study  # noqa: PLC0415
    from veilfed_study import blind_page  # noqa: PLC0415
    from veilfed_study import report as reporting  # noqa: PLC0415
    from veilfed_study.blind_data import students_of, subject_of  # noqa: PLC0415
    from veilfed_study.store import Store  # noqa: PLC0415

    asked, chosen = students_of(student), options.seeds(seeds)
    grid = study.Grid(
        options.counts(clients, "--clients"),
        options.numbers(alphas, float, "--alphas"),
        options.counts(ranks, "--ranks"),
    )
    settings = study.Settings(rounds=rounds, rate=rate, alpha=alpha, epochs=epochs)
    options.one_thread()
    where = packages_folder or packages.default_folder()
    with options.embedding() as progress:
        subjects = [
            subject_of(label, path, data, rows, where, out / "streams", progress) for label, path in asked.items()
        ]
    with _training(None) as told:
        document = study.study(subjects, chosen, grid, settings, Store(out / "blind"), told)
    reporting.write_document(json_file or out / "blind.json", document)
    for table in blind_page.tables(document):
        output.result(None, output.table(table.columns, table.rows, table.title))
    if page is not None:
        blind_page.write_page(document, page)


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


def _settings(path: Path | None, task: str | None) -> Settings:
    if path is not None:
        return read_settings(path)
    return built_in_settings(task) if task else Settings()
