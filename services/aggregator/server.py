"""Puts the aggregator together and runs it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aggregator.artifacts import Artifacts
from aggregator.config import AggregatorConfig
from aggregator.coordinator import Coordinator
from aggregator.engine import Engine
from aggregator.intake import Intake
from aggregator.job_service import Jobs
from aggregator.store.database import Database
from veilfed.errors import Code, VeilfedError
from veilfed.identity.material import Credentials, load_credentials
from veilfed.identity.names import Role
from veilfed.rpc.server import create_server, run_server
from veilfed.v1.aggregator_pb2_grpc import add_CoordinatorServicer_to_server, add_JobServiceServicer_to_server

__all__ = ["engine", "serve"]


def _credentials(config: AggregatorConfig) -> Credentials:
    credentials = load_credentials(config.identity)
    if credentials.identity.role is not Role.AGGREGATOR:
        raise VeilfedError(Code.IDENTITY_INVALID, f"{credentials.identity} is not the identity of an aggregator")
    return credentials


@asynccontextmanager
async def engine(config: AggregatorConfig) -> AsyncIterator[Engine]:
    """The engine, started, for as long as the block lasts."""
    credentials = _credentials(config)
    artifacts = Artifacts.open(config.artifacts)
    try:
        database = Database(config.database)
        try:
            made = Engine(
                database,
                artifacts,
                config.lease_seconds,
                federation=credentials.identity.federation,
                bundle_pem=credentials.bundle_pem,
            )
            try:
                await made.start()
                yield made
            finally:
                await made.stop()
        finally:
            database.close()
    finally:
        artifacts.close()


async def serve(config: AggregatorConfig) -> None:
    """Serves until SIGTERM. Raises VeilfedError when the aggregator cannot start."""
    credentials = _credentials(config)
    async with engine(config) as made:
        server, port = create_server(credentials, config.listen, keepalive_seconds=config.keepalive_seconds)
        add_CoordinatorServicer_to_server(Coordinator(made, Intake(made, credentials)), server)
        add_JobServiceServicer_to_server(Jobs(made), server)
        await run_server(server, port, name="aggregator", on_stop=made.stop)
