"""What the commands of administrators share: their options, and a connection to the aggregator."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from pydantic import Field

from veilfed.config import Strict, load_config
from veilfed.errors import Code, VeilfedError
from veilfed.identity.material import TlsFiles, load_credentials
from veilfed.identity.names import Identity
from veilfed.rpc.channel import open_channel, translated
from veilfed.v1.aggregator_pb2_grpc import CoordinatorStub, JobServiceStub

__all__ = [
    "CALL_SECONDS",
    "Admin",
    "AdminConfig",
    "JobId",
    "run",
    "settings_of",
]

Result = TypeVar("Result")

CALL_SECONDS = 30.0


class AdminConfig(Strict):
    """The keys of --config; options and environment variables go before them."""

    identity: Path | None = Field(None, description="folder with certificate.pem, key.pem and bundle.pem")
    aggregator: str | None = Field(None, description="host:port")
    aggregator_id: str | None = Field(None, description="SPIFFE id of the aggregator")


IdentityOption = Annotated[
    Path | None,
    typer.Option(
        "--identity", envvar="VEILFED_ADMIN_IDENTITY", help="Folder with certificate.pem, key.pem, bundle.pem."
    ),
]
AddressOption = Annotated[
    str | None, typer.Option("--aggregator", envvar="VEILFED_ADMIN_AGGREGATOR", help="host:port of the aggregator.")
]
ServerOption = Annotated[
    str | None,
    typer.Option("--aggregator-id", envvar="VEILFED_ADMIN_AGGREGATOR_ID", help="SPIFFE id of the aggregator."),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", envvar="VEILFED_ADMIN_CONFIG", help="YAML: identity, aggregator, aggregator_id."),
]
JobId = Annotated[str, typer.Argument(metavar="ID", help="The job's id, as `submit` and `list` print it.")]


class Admin:
    """A connection to the aggregator."""

    def __init__(self, jobs: JobServiceStub, coordinator: CoordinatorStub) -> None:
        self.jobs: Any = jobs
        self.coordinator: Any = coordinator


@asynccontextmanager
async def _connected(settings: AdminConfig) -> AsyncIterator[Admin]:
    for name in ("identity", "aggregator", "aggregator_id"):
        if getattr(settings, name) is None:
            option = name.replace("_", "-")
            raise VeilfedError(
                Code.CONFIG_INVALID,
                f"the {option} is not given",
                f"Give --{option}, VEILFED_ADMIN_{name.upper()}, or `{name}` in a file named with --config.",
            )
    credentials = load_credentials(TlsFiles.in_folder(settings.identity or Path()))
    address = settings.aggregator or ""
    try:
        server = Identity.parse(settings.aggregator_id or "")
    except VeilfedError as error:
        raise VeilfedError(Code.CONFIG_INVALID, f"the aggregator-id: {error.message}") from None
    channel = open_channel(credentials, address, server)
    async with channel:
        with translated(credentials, address):
            yield Admin(JobServiceStub(channel), CoordinatorStub(channel))


def run(settings: AdminConfig, call: Callable[[Admin], Awaitable[Result]]) -> Result:
    """What `call` returns with a connection. Raises VeilfedError."""

    async def connected() -> Result:
        async with _connected(settings) as admin:
            return await call(admin)

    return asyncio.run(connected())


def settings_of(
    identity: IdentityOption = None,
    aggregator: AddressOption = None,
    aggregator_id: ServerOption = None,
    config: ConfigOption = None,
) -> AdminConfig:
    """The options, completed from the file; a relative folder in the file is relative to the file."""
    read = load_config(AdminConfig, config) if config is not None else AdminConfig()
    folder = read.identity if read.identity is None or config is None else config.parent / read.identity
    return AdminConfig(
        identity=identity or folder,
        aggregator=aggregator or read.aggregator,
        aggregator_id=aggregator_id or read.aggregator_id,
    )
