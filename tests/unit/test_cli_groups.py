"""Options that several commands take."""

from dataclasses import dataclass
from typing import Annotated

import typer
from typer.testing import CliRunner

from veilfed.cli.groups import taking


@dataclass(frozen=True)
class Connection:
    host: str
    port: int


def connection(
    host: Annotated[str, typer.Option(help="Whom.")], port: Annotated[int, typer.Option()] = 443
) -> Connection:
    return Connection(host, port)


def app() -> typer.Typer:
    made = typer.Typer()

    @made.command()
    @taking(connection)
    def show(to: Connection, name: Annotated[str, typer.Argument()], loud: bool = False) -> None:
        """Shows something."""
        typer.echo(f"{to.host} {to.port} {name} {loud}")

    @made.command()
    @taking(connection)
    def end(to: Connection) -> None:
        typer.echo(f"end {to.host} {to.port}")

    return made


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app(), words)
    return result.exit_code, result.output


def test_a_command_has_its_own_options_and_the_shared_ones() -> None:
    assert run("show", "x", "--host", "h", "--port", "1", "--loud") == (0, "h 1 x True\n")
    assert run("end", "--host", "h") == (0, "end h 443\n")


def test_what_is_required_is_required_and_what_is_wrong_is_refused() -> None:
    assert run("end")[0] == 2
    assert run("show", "x", "--host", "h", "--port", "one")[0] == 2


def test_the_help_has_both() -> None:
    code, text = run("show", "--help")
    assert code == 0
    assert all(words in text for words in ("Shows something.", "--host", "Whom.", "--loud", "name"))
