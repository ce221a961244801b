"""`veilfed config`: checks configuration files without starting anything."""

from enum import StrEnum
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

import typer

from veilfed.cli import output
from veilfed.config import Strict, parse_yaml, read_text, validate
from veilfed.errors import Code, VeilfedError
from veilfed.jobs import parse_job

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Checks configuration files.")


@app.callback()
def _group() -> None:
    """A callback keeps `check` a subcommand while it is the only one."""


class Kind(StrEnum):
    """Whose configuration a file is."""

    JOB = "job"
    AGENT = "agent"
    ORACLE = "oracle"
    AGGREGATOR = "aggregator"


# Keys that only this kind of file has, in the order in which they are looked for.
MARKS = {
    Kind.JOB: {"strategy", "cohort", "rounds"},
    Kind.AGENT: {"aggregator", "oracle", "data"},
    Kind.ORACLE: {"model", "quota"},
    Kind.AGGREGATOR: {"database", "artifacts"},
}


@app.command("check")
def check(
    file: Annotated[Path, typer.Argument(help="A YAML file: a job, or the configuration of a service.")],
    kind: Annotated[Kind | None, typer.Option(help="What the file is; told from its keys if not given.")] = None,
    as_json: output.Json = False,
) -> None:
    """Checks a file; ends with CONFIG_INVALID or JOB_INVALID, and names the line and key of every problem."""
    text = read_text(file)
    found = kind or _guess(parse_yaml(text, str(file)), file)
    if found is Kind.JOB:
        parse_job(text, str(file))
    else:
        validate(_model(found), text, str(file))
    output.result({"file": str(file), "kind": found.value, "valid": True}, f"{file}: valid ({found.value})", as_json)


def _guess(document: Any, file: Path) -> Kind:
    keys = set(document) if isinstance(document, dict) else set()
    for kind, marks in MARKS.items():
        if keys & marks:
            return kind
    raise VeilfedError(Code.CONFIG_INVALID, f"{file}: its keys do not tell what it configures", "Say it with --kind.")


def _model(kind: Kind) -> type[Strict]:
    """The class of a party's configuration, from the entry points `veilfed.config`."""
    for entry in entry_points(group="veilfed.config", name=kind.value):
        try:
            model: type[Strict] = entry.load()
        except ImportError as error:
            raise VeilfedError(
                Code.CONFIG_INVALID,
                f"a configuration of kind {kind.value} cannot be checked here: {error.name} is not installed",
                f"Install the party's extra: pip install 'veilfed[{kind.value}]'.",
            ) from None
        return model
    raise VeilfedError(Code.CONFIG_INVALID, f"no configuration of kind {kind.value} is installed")
