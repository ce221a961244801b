"""A party's gRPC server: mutual TLS 1.3, the guard, health, an orderly end."""

import asyncio
import json
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from veilfed import protocol
from veilfed.errors import Code, VeilfedError
from veilfed.identity.material import Credentials
from veilfed.logs import get_logger
from veilfed.rpc.guard import Guard, peer
from veilfed.rpc.progress import STALL_SECONDS
from veilfed.rpc.roles import ROLES

__all__ = ["create_server", "peer", "run_server", "say_ready", "stop_requested"]

log = get_logger("rpc.server")

KEEPALIVE_SECONDS = 60.0


def _options(max_message_bytes: int, keepalive_seconds: float) -> list[tuple[str, int]]:
    keepalive_ms = round(1000 * keepalive_seconds)
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_metadata_size", 16 * 1024),
        ("grpc.max_concurrent_streams", 1000),
        ("grpc.so_reuseport", 0),  # a second server on one port must fail, not share the calls
        # An agent may be silent for hours while it trains: its pings keep the connection and are welcome.
        ("grpc.http2.min_ping_interval_without_data_ms", keepalive_ms // 12),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", keepalive_ms // 3),
        ("grpc.http2.ping_timeout_ms", keepalive_ms // 3),
    ]


def _server_credentials(credentials: Credentials, *, require_client: bool) -> grpc.ServerCredentials:
    return grpc.ssl_server_credentials(
        [(credentials.key_pem, credentials.certificate_pem)],
        root_certificates=credentials.bundle_pem if require_client else None,
        require_client_auth=require_client,
    )


def create_server(
    credentials: Credentials,
    listen: str,
    *,
    max_message_bytes: int = protocol.MAX_MESSAGE_BYTES,
    interceptors: "Sequence[grpc.aio.ServerInterceptor[Any, Any]]" = (),
    require_client: bool = True,
    keepalive_seconds: float = KEEPALIVE_SECONDS,
    stall_seconds: float = STALL_SECONDS,
) -> tuple[grpc.aio.Server, int]:
    """A server that is bound but not started, and its port (useful where `listen` asks for port 0).

    Everyone needs a certificate of the bundle and a role that is listed for the method; `require_client=False` is for
    the enrolment service alone. `stall_seconds` is for calls in which nothing moves; see Guard.
    Raises VeilfedError(UNREACHABLE) when the address cannot be bound.
    """
    guard = Guard(ROLES, credentials.identity.federation if require_client else None, stall_seconds)
    server = grpc.aio.server(
        interceptors=[guard, *interceptors], options=_options(max_message_bytes, keepalive_seconds)
    )
    try:
        port = server.add_secure_port(listen, _server_credentials(credentials, require_client=require_client))
    except RuntimeError:
        port = 0
    if port == 0:
        raise VeilfedError(
            Code.UNREACHABLE, f"cannot listen on {listen}", "Is the address right, and the port free?"
        ) from None
    return server, port


def stop_requested() -> asyncio.Event:
    """An event that SIGTERM and SIGINT set."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, event.set)
    return event


def say_ready(service: str, port: int | None = None) -> None:
    """One JSON line on standard output that tells whoever started the process that it can be used."""
    document = {"ready": True, "service": service, **({} if port is None else {"port": port})}
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


async def run_server(
    server: grpc.aio.Server,
    port: int,
    *,
    name: str,
    on_stop: Callable[[], Awaitable[None]] | None = None,
    grace_seconds: float = 5.0,
) -> None:
    """Serves until SIGTERM or SIGINT, then tells health checks, calls `on_stop` and lets calls in flight end."""
    health = HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    stop = stop_requested()
    await server.start()
    await health.set("", health_pb2.HealthCheckResponse.SERVING)
    log.info("serving", service=name, port=port)
    say_ready(name, port)
    try:
        await stop.wait()
    finally:
        log.info("stopping", service=name)
        await health.enter_graceful_shutdown()
        if on_stop is not None:
            await on_stop()
        await server.stop(grace_seconds)
        log.info("stopped", service=name)
