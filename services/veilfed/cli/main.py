"""The `veilfed` command: shared subcommands here, those of the parties by the entry points `veilfed.cli`."""

import sys
import traceback
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NoReturn, cast

import typer

from veilfed import __version__
from veilfed.cli import changes, config, demo, ledger, output, pki
from veilfed.errors import Code, VeilfedError

__all__ = ["build", "main"]

# What typer returns after an interrupt, in place of raising it.
INTERRUPTED = 130


def _not_installed(cause: ImportError) -> VeilfedError:
    return VeilfedError(Code.PACKAGE_MISSING, f"the package {cause.name} is not installed")


def _add_missing(app: typer.Typer, name: str, cause: ImportError) -> None:
    """Stands in for a party whose extra is not installed, and says so when it is called with whatever words."""
    error = _not_installed(cause)

    def explain() -> None:
        raise error

    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    app.command(name, help=f"(not installed: {cause.name} is missing)", context_settings=settings)(explain)


def _add(app: typer.Typer, entry: EntryPoint) -> None:
    """Adds a party's subcommand: a typer.Typer is a group, a function is a command."""
    try:
        found = entry.load()
    except ImportError as error:
        _add_missing(app, entry.name, error)
        return
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
    app.add_typer(changes.app, name="job")
    app.add_typer(ledger.app, name="ledger")
    app.add_typer(config.app, name="config")
    for entry in sorted(entry_points(group="veilfed.cli"), key=lambda entry: entry.name):
        _add(app, entry)
    return app


def main() -> None:
    """Runs the command and ends the process with the exit code of the catalogue."""
    try:
        if build()(standalone_mode=False) == INTERRUPTED:
            raise KeyboardInterrupt
    except VeilfedError as error:
        _fail(error)
    except typer.TyperException as error:  # a wrong use of the command line
        cast(Any, error).show()  # not in its stubs
        sys.exit(2)
    except ImportError as error:
        _fail(_not_installed(error))
    except (KeyboardInterrupt, typer.Abort):
        _fail(VeilfedError(Code.CANCELLED, "stopped by the user"))
    except Exception as error:
        # Where it happened, not what was in it: a message may hold something private.
        output.say("".join(traceback.format_tb(error.__traceback__)))
        _fail(
            VeilfedError(Code.INTERNAL, f"unexpected {type(error).__name__}", "This is a fault of veilfed; report it.")
        )


def _fail(error: VeilfedError) -> NoReturn:
    output.failure(error)
    sys.exit(error.code.exit_code)


if __name__ == "__main__":
    main()
