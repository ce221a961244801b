"""What the command line prints: results on standard output, errors and progress on standard error."""

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from veilfed.errors import VeilfedError

__all__ = ["Json", "failure", "line", "progress", "result", "say", "table"]

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]

# A pipe or a file has no width: tables there are as wide as they need.
WIDE = 200

_console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else WIDE)
_errors = Console(stderr=True, highlight=False, soft_wrap=True)


def _shown(text: str) -> Text:
    """Words of whomever, as they are: no markup in them, and no characters that steer a terminal."""
    return Text("".join(char if char.isprintable() or char == "\n" else " " for char in text))


def result(document: Any, text: str | Table | None = None, as_json: bool = False) -> None:
    """Prints a command's result: the text or table for people, the document with --json."""
    if as_json:
        sys.stdout.write(json.dumps(document, indent=2, sort_keys=True) + "\n")
    elif text is not None:
        _console.print(_shown(text) if isinstance(text, str) else text)


def line(document: Any) -> None:
    """Prints a document as one line of JSON, at once: for commands that go on and on."""
    sys.stdout.write(json.dumps(document, sort_keys=True) + "\n")
    sys.stdout.flush()


def say(text: str) -> None:
    """Prints a line for people on standard error."""
    _errors.print(_shown(text))


def failure(error: VeilfedError) -> None:
    """Prints an error: code, message, hint. With --json on the command line, as JSON."""
    if "--json" in sys.argv:
        document = {"error": error.code.name, "message": error.message, "hint": error.hint}
        sys.stderr.write(json.dumps(document, sort_keys=True) + "\n")
        return
    say(f"error {error.code.name}: {error.message}")
    say(f"hint: {error.hint}")


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None) -> Table:
    """A plain table; numbers should come formatted."""
    heading = None if title is None else _shown(title)
    made = Table(*columns, title=heading, title_justify="left", box=None, pad_edge=False)
    for row in rows:
        made.add_row(*(_shown(str(cell)) for cell in row))
    return made


def progress() -> Progress:
    """A progress bar on standard error for everything that lasts longer than two seconds."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=_errors,
        transient=True,
        disable=not _errors.is_terminal,
    )
