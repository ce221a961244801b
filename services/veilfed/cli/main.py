"""The `veilfed` command: shared subcommands here, those of the parties by the entry points `veilfed.cli`."""

import sys
from importlib.metadata import EntryPoint, entry_points

import click
import typer

from veilfed import __version__
from veilfed.cli import config, demo, job, ledger, output, pki
from veilfed.errors import Code, VeilfedError

__all__ = ["build", "main"]


def _missing_party(name: str, cause: ImportError) -> typer.Typer:
    """Stands in for a party whose extra is not installed, and says so when it is called."""
    app = typer.Typer(help=f"(not installed: {cause.name} is missing)")

    @app.callback(invoke_without_command=True, context_settings={"ignore_unknown_options": True})
    def explain(arguments: list[str] = typer.Argument(None, hidden=True)) -> None:  # noqa: B008
        raise VeilfedError(
            Code.CONFIG_INVALID,
            f"`veilfed {name}` needs the package {cause.name}, which is not installed",
            "Install the party's extra: pip install 'veilfed[oracle]', 'veilfed[aggregator]' or 'veilfed[agent]'.",
        )

    return app


def _add(app: typer.Typer, entry: EntryPoint) -> None:
    """Adds a party's subcommand: a typer.Typer is a group, a function is a command."""
    try:
        found = entry.load()
    except ImportError as error:
        found = _missing_party(entry.name, error)
    if isinstance(found, typer.Typer):
        app.add_typer(found, name=entry.name)
    else:
        app.command(entry.name)(found)


def build() -> typer.Typer:
    """The whole command."""
    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        help="Adapts a foundation model that nobody may look into, on data that nobody may take away.",
    )

    @app.callback(invoke_without_command=True)
    def root(version: bool = typer.Option(False, "--version", help="Print the version and end.")) -> None:
        if version:
            output.result({"version": __version__}, __version__)
            raise typer.Exit

    app.command("demo")(demo.demo)
    app.add_typer(pki.app, name="pki")
    app.add_typer(job.app, name="job")
    app.add_typer(ledger.app, name="ledger")
    app.add_typer(config.app, name="config")
    for entry in sorted(entry_points(group="veilfed.cli"), key=lambda entry: entry.name):
        _add(app, entry)
    return app


def main() -> None:
    """Runs the command and ends the process with the exit code of the catalogue."""
    try:
        build()(standalone_mode=False)
    except VeilfedError as error:
        output.failure(error)
        sys.exit(error.code.exit_code)
    except click.exceptions.Exit as ended:
        sys.exit(ended.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except (KeyboardInterrupt, click.Abort):
        output.failure(VeilfedError(Code.CANCELLED, "stopped by the user"))
        sys.exit(Code.CANCELLED.exit_code)


if __name__ == "__main__":
    main()
