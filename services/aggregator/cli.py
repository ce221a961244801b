"""`veilfed aggregator`: serve."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from veilfed import logs
from veilfed.config import load_config
from veilfed.memory import keep_memory

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="The coordinator's service: rounds, averages, nobody's data.")


@app.callback()
def root() -> None:
    """Keeps `serve` a subcommand although it is the only one."""


@app.command()
def serve(config: Annotated[Path, typer.Option("--config", help="The aggregator's configuration (YAML).")]) -> None:
    """Serves agents and administrators until SIGTERM."""
    from aggregator.config import AggregatorConfig  # noqa: PLC0415  help texts need no database

    keep_memory()
    from aggregator.server import serve as run  # noqa: PLC0415

    loaded = load_config(AggregatorConfig, config)
    logs.configure(loaded.log_level)
    asyncio.run(run(loaded))
