"""Options that several commands take: said once, as the parameters of a function that makes something of them.

def connection(host: Annotated[str, typer.Option()], port: Annotated[int, typer.Option()] = 443) -> Connection: ...

@app.command()
@taking(connection)
def show(connection: Connection, name: str) -> None: ...      # show NAME --host H --port P
"""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

__all__ = ["taking"]

Made = TypeVar("Made")


def taking(maker: Callable[..., Made]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command the options of `maker` beside its own, and as its first argument what `maker` makes of them."""
    shared = inspect.signature(maker, eval_str=True).parameters

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        _, *own = inspect.signature(command, eval_str=True).parameters.values()

        @wraps(command)
        def called(**values: Any) -> None:
            made = maker(**{name: values.pop(name) for name in shared})
            command(made, **values)

        together = [*own, *shared.values()]
        described: Any = called
        # What typer reads.
        described.__signature__ = inspect.Signature(
            [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in together]
        )
        described.__annotations__ = {parameter.name: parameter.annotation for parameter in together}
        return called

    return decorate
