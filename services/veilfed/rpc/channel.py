"""Connections to another party, and the translation of what goes wrong on them."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import grpc

from veilfed import protocol
from veilfed.errors import Code, VeilfedError
from veilfed.identity.certificates import load_certificates
from veilfed.identity.explain import faults
from veilfed.identity.material import Credentials
from veilfed.identity.names import Identity
from veilfed.rpc import endings
from veilfed.rpc.guard import CODE_KEY, HINT_KEY

__all__ = ["open_channel", "translate", "translated"]

KEEPALIVE_SECONDS = 30.0

# What grpc says of a call that got no connection: nobody was there; somebody hung up before TLS had begun; this side
# did not accept the other. Where the other side does not accept this one, TLS 1.3 tells nothing: it hangs up.
NO_CONNECTION = "failed to connect to all addresses"
NOBODY = ("connection refused", "failed to connect to remote host", "errors resolving", "unreachable", "no route")
BEFORE_TLS = "handshake read failed"
SILENT = "handshake read failed (endpoint closing)"  # by this side, after 20 seconds
NOT_ACCEPTED = ("tls handshake failed", "verification check failed")
HUNG_UP = ("socket closed", "connection reset", "broken pipe")


def _options(server: Identity, max_message_bytes: int, keepalive_seconds: float) -> list[tuple[str, str | int]]:
    return [
        # The certificate must be of this role and name, whatever the address says.
        ("grpc.ssl_target_name_override", server.server_name),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_metadata_size", 32 * 1024),  # an error's message, percent-encoded
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),  # who retries what is our decision: a resent update must be the same update
        ("grpc.keepalive_time_ms", round(1000 * keepalive_seconds)),
        ("grpc.keepalive_timeout_ms", round(1000 * keepalive_seconds * 2 / 3)),
        # grpc gives the answer to a ping 60 s of its own, whatever the line above says.
        ("grpc.http2.ping_timeout_ms", round(1000 * keepalive_seconds * 2 / 3)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 5_000),
    ]


def open_channel(
    credentials: Credentials,
    address: str,
    server: Identity,
    *,
    roots: bytes | None = None,
    interceptors: Sequence[grpc.aio.ClientInterceptor] = (),
    max_message_bytes: int = protocol.MAX_MESSAGE_BYTES,
    keepalive_seconds: float = KEEPALIVE_SECONDS,
) -> grpc.aio.Channel:
    """A channel to `server` at `address` over mutual TLS.

    After `keepalive_seconds` of silence it asks whether the other side lives, and ends the connection when two thirds
    of that later there is no answer.

    `roots` replaces the bundle as the only trusted roots: an institution's own zone root for its oracle. Raises
    VeilfedError(IDENTITY_INVALID) where they hold no certificate: gRPC would trust the machine's roots instead.
    """
    if roots is not None:
        load_certificates(roots, f"the roots for {server}")
    secure = grpc.ssl_channel_credentials(
        root_certificates=credentials.bundle_pem if roots is None else roots,
        private_key=credentials.key_pem,
        certificate_chain=credentials.certificate_pem,
    )
    return grpc.aio.secure_channel(
        address,
        secure,
        options=_options(server, max_message_bytes, keepalive_seconds),
        interceptors=[*interceptors, *endings.interceptors()],
    )


def _unavailable(credentials: Credentials | None, address: str, details: str) -> VeilfedError:
    """Nobody there, a connection that was cut, or a handshake that one side refused."""
    lowered = details.lower()
    if any(words in lowered for words in NOBODY):
        return VeilfedError(Code.UNREACHABLE, f"{address}: nobody answers")
    if NO_CONNECTION not in lowered:
        return VeilfedError(Code.UNREACHABLE, f"{address}: the connection was cut")
    if SILENT in lowered:
        return VeilfedError(
            Code.TIMEOUT,
            f"{address}: somebody is there and says nothing",
            "Check that the service behind this address runs and is not overloaded; try again.",
        )
    if BEFORE_TLS in lowered:
        return VeilfedError(
            Code.UNREACHABLE,
            f"{address}: whoever answers hangs up before TLS begins",
            "Check that the service behind this address runs, and a proxy before it passes TLS on.",
        )
    return _refused(credentials, address, lowered)


def _refused(credentials: Credentials | None, address: str, lowered: str) -> VeilfedError:
    """What ended a handshake: this party's own files, as far as they tell; this side, or the other one."""
    if credentials is not None and (found := faults(credentials)):
        return VeilfedError(Code.TLS_REFUSED, f"{address}: the handshake failed; " + "; ".join(found))
    if any(words in lowered for words in NOT_ACCEPTED):
        return VeilfedError(
            Code.TLS_REFUSED,
            f"{address}: the server did not prove to be the one expected, or is not TLS 1.3",
            "Check the server's identity and the trusted roots in the configuration.",
        )
    if any(words in lowered for words in HUNG_UP):
        return VeilfedError(
            Code.TLS_REFUSED,
            f"{address}: the connection was closed; the server may not trust this certificate, or has stopped",
        )
    return VeilfedError(Code.UNREACHABLE, f"{address}: no connection")


_PLAIN = {
    grpc.StatusCode.DEADLINE_EXCEEDED: (Code.TIMEOUT, "no answer in time"),
    grpc.StatusCode.CANCELLED: (Code.CANCELLED, "the call was cancelled"),
    grpc.StatusCode.UNIMPLEMENTED: (Code.PROTOCOL_VERSION, "the server does not know this call"),
}


def translate(error: grpc.aio.AioRpcError, credentials: Credentials | None, address: str) -> VeilfedError:
    """The error of the catalogue for what grpc raised."""
    metadata: Iterable[tuple[str, Any]] = cast(Any, error.trailing_metadata()) or ()
    trailing = {key: value for key, value in metadata if isinstance(value, str)}
    details = error.details() or ""
    if trailing.get(CODE_KEY) in Code.__members__:
        return VeilfedError(Code[trailing[CODE_KEY]], details, trailing.get(HINT_KEY))
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        return _unavailable(credentials, address, details)
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return VeilfedError(Code.MESSAGE_TOO_LARGE, f"{address}: {details}")
    code, words = _PLAIN.get(error.code(), (Code.INTERNAL, f"the call failed with {error.code().name}"))
    return VeilfedError(code, f"{address}: {words}")


@contextmanager
def translated(credentials: Credentials | None, address: str) -> Iterator[None]:
    """Turns what grpc raises inside the block into errors of the catalogue."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise translate(error, credentials, address) from None
